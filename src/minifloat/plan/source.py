"""Where the tensors of a model are told from: its headers, or its config alone where there are no weights.

Layers and experts repeat, and what becomes of a tensor depends on nothing but its role, shape and dtype. So of tensors
that differ by a number in their name only, one stands for all: a mixture of 45,000 tensors is planned as fast as a
small model. Fused experts are left alone, since their rows and columns are told from each other by their neighbours.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minifloat.architecture.roles import role_of, text_config
from minifloat.checkpoint import CONFIG_FILE, TensorInfo
from minifloat.checkpoint.files import parse_object, read_small
from minifloat.checkpoint.layout import is_weights
from minifloat.errors import ConfigError, NotACheckpointError
from minifloat.hub import list_model_files
from minifloat.plan.quantization import TensorPlan
from minifloat.plan.stored import StoredModel, stored_model
from minifloat.plan.tensors import tensors_of

_CONFIG_LIMIT = 16 * 2**20
_NUMBER = re.compile(r"\.\d+\.")
_MATRIX = 2


@dataclass(frozen=True)
class ModelSource:
    """A model as its headers or its config describe it.

    Attributes:
        path: The folder with the config, links resolved.
        config: The content of config.json.
        quantization_config: How its weights are quantized already; None for a plain model.
        tensors: By name, one for all that are alike.
        copies: Name -> how many the tensor stands for, itself included.
        stored: What lies there, where it is quantized already and has weights.
        estimated: Whether the tensors were derived from the config: names and shapes by convention.
    """

    path: Path
    config: Mapping[str, Any]
    quantization_config: Mapping[str, Any] | None
    tensors: Mapping[str, TensorInfo]
    copies: Mapping[str, int]
    stored: StoredModel | None
    estimated: bool

    @property
    def plans(self) -> tuple[TensorPlan, ...]:
        """Every tensor as it is."""
        if self.stored is not None:
            return self.stored.tensors
        return tuple(TensorPlan(info, role_of(info)) for info in self.tensors.values())


def open_source(model: str | os.PathLike[str], *, revision: str | None = None) -> ModelSource:
    """Read the config, and the headers of a model that has weights.

    Args:
        model: A folder, or a model of the hub, whose weights stay there.
        revision: Of a model of the hub, as in `minifloat.hub.model_folder`.

    Raises:
        HubError: The hub has no such model, refuses it, or cannot be reached.
        CheckpointError: The files are not what they claim to be.
        UsageError: No weights, and an architecture whose tensors the config does not tell.
        StorageError: The system refuses a read.
    """
    files = list_model_files(model, revision=revision)
    root = files.root
    if any(is_weights(name) for name in files.names):
        with files.open() as found:
            stored = None if found.quantization_config is None else stored_model(found)
            alike = (
                _alike(found.tensors.values()) if stored is None else (found.tensors, dict.fromkeys(found.tensors, 1))
            )
            return ModelSource(root, found.config, found.quantization_config, *alike, stored, estimated=False)
    try:
        config = parse_object(
            read_small(root, CONFIG_FILE, _CONFIG_LIMIT, ConfigError), root / CONFIG_FILE, ConfigError
        )
    except FileNotFoundError:
        raise NotACheckpointError(root, f"no {CONFIG_FILE}; give the folder that holds it") from None
    outputs = tensors_of(config, root)
    alike = _alike(TensorInfo(output.name, output.dtype, output.shape, "", 0, output.nbytes) for output in outputs)
    quantized = config.get("quantization_config") or text_config(config).get("quantization_config")
    return ModelSource(root, config, quantized, *alike, None, estimated=True)


def _alike(tensors: Iterable[TensorInfo]) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """The first of the tensors that are alike, by name, and how many there are."""
    first: dict[tuple[str, str, tuple[int, ...]], TensorInfo] = {}
    copies: Counter[str] = Counter()
    for info in tensors:
        pattern = info.name if len(info.shape) > _MATRIX else _NUMBER.sub(".*.", info.name)
        copies[first.setdefault((pattern, info.dtype, info.shape), info).name] += 1
    return {info.name: info for info in first.values()}, dict(copies)
