"""The transformers config of a checkpoint, its dtype and its generation config; no modelling code is imported.

Code that comes with a checkpoint is never run.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from minifloat.checkpoint import CONFIG_FILE, Checkpoint
from minifloat.errors import ConfigError

_GENERATION_FILE = "generation_config.json"
#: What `describe` reads, and what could have transformers fetch kernels, which are code, from the hub.
_DROPPED_KEYS = (
    "quantization_config",
    "compression_config",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
    "auto_map",
)


def plain_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return transformers' config of the unquantized model.

    Raises:
        ConfigError: If transformers does not know the model type, or only with the checkpoint's own code, or refuses a
            value.
    """
    path = checkpoint.path / CONFIG_FILE
    values = _without_dropped_keys(checkpoint.config)
    model_type = str(values.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        cure = f"transformers {transformers.__version__} does not have it; install a version that does"
        if checkpoint.config.get("auto_map"):
            cure = "it needs the Python code that comes with the checkpoint, which is not run here"
        raise ConfigError(path, f"model_type {model_type}: {cure}")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # config classes validate with errors of several libraries
        raise ConfigError(path, f"transformers {transformers.__version__} cannot use it: {error}") from error
    config.name_or_path = str(checkpoint.path)
    return config


def config_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """Return the dtype that config.json names, or None if it names none.

    Raises:
        ConfigError: If the name is not that of a floating dtype.
    """
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
    """Return the content of generation_config.json, or None if there is no such file.

    Raises:
        ConfigError: If transformers cannot use the file.
    """
    path = checkpoint.path / _GENERATION_FILE
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(str(checkpoint.path), local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(path, f"transformers cannot use it: {error}") from error


def _without_dropped_keys(value: Any) -> Any:
    """Return a config without `_DROPPED_KEYS`, at any depth."""
    if not isinstance(value, dict):
        return value
    return {key: _without_dropped_keys(item) for key, item in value.items() if key not in _DROPPED_KEYS}
