"""The transformers config of a checkpoint, its dtype and its generation config; no modelling code is imported.

Code that comes with a checkpoint is never run. transformers is imported when a function needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minifloat.checkpoint import CONFIG_FILE, Checkpoint
from minifloat.errors import ConfigError
from minifloat.model.architecture.full_config import full_config
from minifloat.model.runtime.generation_config import GENERATION_FILE, generation_values

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig


def plain_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return transformers' config of the unquantized model."""
    return full_config(checkpoint.config, checkpoint.path)


def config_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """Return the dtype that config.json names, or None if it names none."""
    text_config = checkpoint.config.get("text_config")
    for values in (checkpoint.config, text_config if isinstance(text_config, dict) else {}):
        name = values.get("dtype") or values.get("torch_dtype")
        if name is None:
            continue
        dtype = getattr(torch, str(name).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(checkpoint.path / CONFIG_FILE, f"dtype: expected a floating dtype, found {name!r}")
        return dtype
    return None


def read_generation_config(checkpoint: Checkpoint) -> GenerationConfig | None:
    """Return the content of generation_config.json, or None if there is no such file."""
    from transformers import GenerationConfig

    path = checkpoint.path / GENERATION_FILE
    if generation_values(checkpoint) is None:
        return None
    try:
        return GenerationConfig.from_pretrained(str(checkpoint.path), local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(path, f"transformers cannot use it: {error}") from error
