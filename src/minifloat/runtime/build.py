"""The empty transformers model of a checkpoint: its class, its config without the quantization, its dtype.

No weight is allocated: parameters lie on the meta device, and only the buffers that a model computes for itself
(rotary frequencies) are real. Code that comes with a checkpoint is never run.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

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


def empty_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a checkpoint with its parameters on the meta device.

    Its class is the one that config.json names under ``architectures`` where that can generate text, else the one that
    transformers has for causal language modelling.

    Args:
        checkpoint: Only its config is used.
        dtype: Dtype of the parameters, except those that the class wants in another.

    Raises:
        ConfigError: transformers cannot build it, or only with the checkpoint's own code.
    """
    config = _plain_config(checkpoint)
    try:
        with init_empty_weights(include_buffers=False):
            cls = _named_class(checkpoint, config)
            build: Any = AutoModelForCausalLM.from_config if cls is None else cls._from_config
            model: PreTrainedModel = build(config, dtype=dtype)
            return model
    except Exception as error:  # whatever a model's constructor makes of numbers that do not fit
        raise ConfigError(
            checkpoint.path / CONFIG_FILE, f"transformers {transformers.__version__} cannot build this model: {error}"
        ) from error


def load_generation_config(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Give the model its generation_config.json, if there is one.

    Raises:
        ConfigError: The file cannot be used.
    """
    path = checkpoint.path / _GENERATION_FILE
    if not model.can_generate() or not path.is_file():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(str(checkpoint.path), local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(path, f"transformers cannot use it: {error}") from error


def config_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """The dtype that config.json gives, or None.

    Raises:
        ConfigError: It is no floating dtype.
    """
    text_config = checkpoint.config.get("text_config")
    for place in (checkpoint.config, text_config if isinstance(text_config, dict) else {}):
        name = place.get("dtype") or place.get("torch_dtype")
        if name is None:
            continue
        dtype = getattr(torch, str(name).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(checkpoint.path / CONFIG_FILE, f"dtype: expected a floating dtype, found {name!r}")
        return dtype
    return None


def _named_class(checkpoint: Checkpoint, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class under ``architectures`` in config.json, if it is one of transformers' for this config and generates."""
    for name in checkpoint.config.get("architectures") or ():
        cls = getattr(transformers, str(name), None)
        if not isinstance(cls, type) or not issubclass(cls, PreTrainedModel):
            continue
        if cls.config_class is type(config) and cls.can_generate():
            return cls
    return None


def _plain_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The config of the unquantized model."""
    path = checkpoint.path / CONFIG_FILE
    values = _trusted(checkpoint.config)
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


def _trusted(value: Any) -> Any:
    """A config without the dropped keys, in its sub-configs neither."""
    if not isinstance(value, dict):
        return value
    return {key: _trusted(item) for key, item in value.items() if key not in _DROPPED_KEYS}
