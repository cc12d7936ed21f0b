"""What sampling reads in generation_config.json, read without transformers, whose import takes seconds."""

from __future__ import annotations

import json
from types import SimpleNamespace

from minifloat.architecture.decoder_config import is_tokens
from minifloat.checkpoint import Checkpoint

_GENERATION_FILE = "generation_config.json"
#: Numbers of generation_config.json that sampling reads.
_SAMPLING_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_generation(checkpoint: Checkpoint) -> SimpleNamespace | str | None:
    """Return what sampling reads in generation_config.json, None without the file, or why transformers has to read it.

    Fields that the file does not state are None, as in transformers' class.
    """
    path = checkpoint.path / _GENERATION_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    if not isinstance(values, dict):
        return "it is no object"
    numbers = {name: values.get(name) for name in _SAMPLING_NUMBERS}
    if any(value is not None and type(value) not in (int, float) for value in numbers.values()):
        return "a sampling parameter is no number"
    if not is_tokens(values.get("eos_token_id")) or values.get("do_sample") not in (None, True, False):
        return "eos_token_id or do_sample is unusual"
    return SimpleNamespace(**numbers, do_sample=values.get("do_sample"), eos_token_id=values.get("eos_token_id"))
