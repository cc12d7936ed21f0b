"""Where the tensors of a model are told from: its headers, or its config alone where there are no weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minifloat.checkpoint import CONFIG_FILE, Checkpoint, TensorInfo
from minifloat.checkpoint.files import list_folder, parse_object, read_small, resolve_folder
from minifloat.checkpoint.layout import is_weights
from minifloat.errors import ConfigError, NotACheckpointError
from minifloat.plan.tensors import tensors_of
from minifloat.quantize.roles import text_config

_CONFIG_LIMIT = 16 * 2**20


@dataclass(frozen=True)
class ModelSource:
    """A model as its headers or its config describe it.

    Attributes:
        path: The folder, links resolved.
        config: The content of config.json.
        quantization_config: How its weights are quantized already; None for a plain model.
        tensors: By name.
        estimated: Whether the tensors were derived from the config: names and shapes by convention.
    """

    path: Path
    config: Mapping[str, Any]
    quantization_config: Mapping[str, Any] | None
    tensors: Mapping[str, TensorInfo]
    estimated: bool


def open_source(path: str | os.PathLike[str]) -> ModelSource:
    """Read the config, and the headers of a folder that has weights.

    Raises:
        CheckpointError: The files are not what they claim to be.
        UsageError: No weights, and an architecture whose tensors the config does not tell.
        StorageError: The system refuses a read.
    """
    root = resolve_folder(path)
    if any(is_weights(name) for name in list_folder(root)):
        with Checkpoint.open(root) as found:
            return ModelSource(root, found.config, found.quantization_config, found.tensors, estimated=False)
    try:
        config = parse_object(
            read_small(root, CONFIG_FILE, _CONFIG_LIMIT, ConfigError), root / CONFIG_FILE, ConfigError
        )
    except FileNotFoundError:
        raise NotACheckpointError(root, f"no {CONFIG_FILE}; give the folder that holds it") from None
    tensors = {
        output.name: TensorInfo(output.name, output.dtype, output.shape, "", 0, output.nbytes)
        for output in tensors_of(config, root)
    }
    quantized = config.get("quantization_config") or text_config(config).get("quantization_config")
    return ModelSource(root, config, quantized, tensors, estimated=True)
