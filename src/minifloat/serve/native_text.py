"""Text of one prompt by the engine's native decoder: for `generate` where the decoder computes what `load` would.

The decoder starts in a fraction of the time, because it needs no transformers. It never quantizes the inputs of
linears, so checkpoints that declare quantized inputs are left to `load`, unless the caller wants weights only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from minifloat.errors import UsageError

if TYPE_CHECKING:
    from minifloat.serve.engine import Engine, SamplingParams

_LOG = logging.getLogger(__name__)
_CONFIG, _MODELOPT = "config.json", "hf_quant_config.json"


def quantizes_inputs(folder: Path) -> bool:
    """Return whether a checkpoint may declare quantized inputs, by its config alone."""
    if (folder / _MODELOPT).exists():
        return True
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
        stated = config.get("quantization_config") or config.get("compression_config")
        if stated is None:
            return "text_config" in config
        if stated.get("quant_method") != "compressed-tensors":
            return True
        groups = stated["config_groups"].values()
        return any(group.get("input_activations") is not None for group in groups)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return True  # whoever opens the checkpoint says what is wrong with it


def open_native(folder: Path, *, weight_only: bool = False) -> Engine | None:
    """Return an engine on the native decoder; None if `load` has to open the model.

    Args:
        folder: A model folder.
        weight_only: Whether inputs stay as they are, whatever the checkpoint declares.

    Raises:
        CheckpointError: If the folder cannot be loaded.
    """
    if not weight_only and quantizes_inputs(folder):
        return None
    from minifloat.serve.engine import Engine

    try:
        return Engine(folder, runner="native", max_num_seqs=1, prefix_cache=False)
    except UsageError as error:
        _LOG.info("transformers' code runs this model: %s", error)
        return None


def native_pieces(engine: Engine, prompt: str, params: SamplingParams) -> Iterator[str]:
    """Return an iterator over pieces of the continuation of a prompt.

    Raises:
        UsageError: If the prompt is empty and the tokenizer has no token to begin with, or it does not fit the model.
    """
    tokens = engine.encode(prompt)
    if not tokens:
        raise UsageError("the prompt is empty, and the tokenizer has no token to begin a text with")
    limit = engine.info.max_model_len
    if len(tokens) >= limit:
        raise UsageError(f"the prompt has {len(tokens)} tokens; the model attends to {limit}")
    return _pieces(engine, tokens, params)


def _pieces(engine: Engine, tokens: tuple[int, ...], params: SamplingParams) -> Iterator[str]:
    for delivery in engine.generate([tokens], params, stream=True):
        if delivery.error is not None:
            raise RuntimeError(delivery.error)
        if delivery.text:
            yield delivery.text
