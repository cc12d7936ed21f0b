"""Long windows in pieces: a model runs over a piece of a window at a time, after the keys and values of those before.

A window of 32,768 tokens run at once needs the intermediate results of all its tokens, and, in attention that is not
fused, a score for each pair of tokens: 2 GiB per head. In pieces, memory is that of one piece and of the KV cache.

Left out: models with recurrent states, whose states transformers does not continue over several tokens at a time. They
run windows whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from minifloat.evaluate.compare.kv_cache import CacheFactory

_LOG = logging.getLogger(__name__)

#: Tokens of a piece; a batch of windows has about as many.
PIECE_TOKENS = 2048
#: Largest number of attention scores that a layer holds at a time, where attention is not fused.
_SCORES = 2**28
_FEWEST_TOKENS = 64
#: Tokens of the trial that shows whether pieces give the result of a whole window, and of its first piece.
_TRIAL, _TRIAL_PIECE = 48, 20
#: Largest difference in this trial, relative to the largest value; rounding alone makes far less.
_TOLERANCE = 1e-2

#: Runs token ids ``[B, T]`` after those in a cache and returns the result ``[B, T, ...]``; without a cache, from 0.
Run = Callable[[Tensor, Any], Tensor]


def piece_tokens(model: PreTrainedModel, window: int) -> int:
    """Return the number of tokens of a piece of a window."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "_attn_implementation", None) != "eager":
        return PIECE_TOKENS
    scores = window * (getattr(config, "num_attention_heads", None) or 1)
    return min(max(_SCORES // scores, _FEWEST_TOKENS), PIECE_TOKENS)


def run_in_pieces(run: Run, ids: Tensor, cache: Any, piece: int) -> Tensor:
    """Return the result ``[B, W, ...]`` of a window ``[B, W]``, computed in pieces into an empty cache."""
    return torch.cat([run(part, cache) for part in torch.split(ids, piece, dim=1)], dim=1)


def plain_cache(model: PreTrainedModel) -> CacheFactory | None:
    """Return a function that makes transformers' own KV cache; None if the model has none of plain attention."""
    if not cast(Any, model)._supports_default_dynamic_cache():
        return None
    config = model.config.get_text_config(decoder=True)
    if not all(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=config).layers):
        return None
    return lambda: DynamicCache(config=config)


@torch.inference_mode()
def continues(model: PreTrainedModel, name: str, run: Run, new_cache: CacheFactory | None) -> bool:
    """Return whether a model gives the same result in pieces as at once; if not, a warning says so."""
    if new_cache is not None:
        vocab_size = int(model.config.get_text_config().vocab_size)
        ids = torch.arange(_TRIAL, device=model.device)[None] % vocab_size
        try:
            pieces = run_in_pieces(run, ids, new_cache(), _TRIAL_PIECE)
        except (TypeError, AttributeError, KeyError, ValueError, RuntimeError):
            pieces = torch.empty(0)
        whole = run(ids, None)
        # NaN counts as equal here; `ScoringPass` reports it.
        if pieces.shape == whole.shape and not bool((pieces - whole).abs().max() > _TOLERANCE * whole.abs().max()):
            return True
    _LOG.warning("%s runs long windows whole, because it cannot continue after a part: this takes much memory", name)
    return False
