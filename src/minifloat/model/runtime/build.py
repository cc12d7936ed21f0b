"""The empty transformers model of a checkpoint: parameters on the meta device; code of the checkpoint is never run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from minifloat.checkpoint import CONFIG_FILE, Checkpoint
from minifloat.errors import ConfigError
from minifloat.model.runtime.config import plain_config


def empty_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a checkpoint with its parameters on the meta device."""
    config = plain_config(checkpoint)
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


def _named_class(checkpoint: Checkpoint, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the first class under ``architectures`` that transformers has for this config and that generates text."""
    for name in checkpoint.config.get("architectures") or ():
        cls = getattr(transformers, str(name), None)
        if not isinstance(cls, type) or not issubclass(cls, PreTrainedModel):
            continue
        if cls.config_class is type(config) and cls.can_generate():
            return cls
    return None


def replace_forward(module: Any, forward: Callable[..., Any]) -> Callable[[], None]:
    former = module.__dict__.get("forward")
    module.forward = forward

    def undo() -> None:
        del module.forward
        if former is not None:
            module.forward = former

    return undo
