"""The transformers config of a checkpoint, its dtype and its generation config; its own code is never run."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from minifloat.checkpoint import CONFIG_FILE, Checkpoint
from minifloat.checkpoint.config_schema import TOKENS, check_depth
from minifloat.checkpoint.files import parse_object, read_small
from minifloat.checkpoint.schema import Check, check_fields, flag, integer, number
from minifloat.errors import ConfigError
from minifloat.model.architecture.decoder_config import is_tokens
from minifloat.model.architecture.full_config import full_config

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

GENERATION_FILE = "generation_config.json"
_LIMIT = 16 * 2**20
#: Numbers of generation_config.json that sampling reads.
_SAMPLING_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SCHEMA: dict[str, Check] = {
    "temperature": number(0),
    "top_p": number(0, 1),
    "top_k": integer(-1),
    "min_p": number(0, 1),
    "repetition_penalty": number(0.01, 100),
    "do_sample": flag,
    "bos_token_id": TOKENS,
    "eos_token_id": TOKENS,
    "pad_token_id": TOKENS,
}


def generation_values(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Return the content of generation_config.json, whose fields are checked; None if there is no such file."""
    path = checkpoint.path / GENERATION_FILE
    try:
        values = parse_object(read_small(checkpoint.path, GENERATION_FILE, _LIMIT, ConfigError), path, ConfigError)
    except FileNotFoundError:
        return None
    check_depth(values, path, ConfigError)
    check_fields(values, _SCHEMA, path, ConfigError)
    return values


def read_generation(checkpoint: Checkpoint) -> SimpleNamespace | str | None:
    """Return what sampling reads in generation_config.json, None without it, or why transformers has to read it."""
    values = generation_values(checkpoint)
    if values is None:
        return None
    if not is_tokens(values.get("eos_token_id")):
        return "eos_token_id is unusual"
    return SimpleNamespace(**{name: values.get(name) for name in (*_SAMPLING_NUMBERS, "do_sample", "eos_token_id")})


def plain_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    return full_config(checkpoint.config, checkpoint.path)


def config_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
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
