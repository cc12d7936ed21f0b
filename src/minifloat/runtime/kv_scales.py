"""The scales of an FP8 KV cache that a checkpoint brings: what its keys and values were divided by."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping

import torch

from minifloat.checkpoint import Checkpoint
from minifloat.errors import CheckpointError, UnsupportedTensorError
from minifloat.layouts import describe
from minifloat.layouts.stored import kv_scale_of
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import CHANNEL, TENSOR, Granularity
from minifloat.runtime.load import TORCH_DTYPES

_LOG = logging.getLogger(__name__)

#: (k_scale, v_scale) by the name of the attention module in the checkpoint; they multiply to dequantize.
KVScales = Mapping[str, tuple[float, float]]
Scales = tuple[float, ...]
#: The same, one scale for each key-value head.
KVHeadScales = Mapping[str, tuple[Scales, Scales]]


def kv_scales(checkpoint: Checkpoint) -> KVScales | None:
    """The scales of a checkpoint's FP8 KV cache.

    Returns:
        None where it neither declares such a cache (E4M3, one scale per tensor) nor has scales for one. Where it
        declares one without scales, nothing: `kv_cache_factory` takes 1.0, as servers do. Where an attention has one of
        the two, the other is the same, as in vLLM.

    Raises:
        CheckpointError: A scale is not a positive number.
        UnsupportedTensorError: A scale has more than one element.
    """
    found = _found(checkpoint, (TENSOR,), 1)
    return None if found is None else {name: (k[0], v[0]) for name, (k, v) in found.items()}


def kv_head_scales(checkpoint: Checkpoint, kv_heads: int) -> KVHeadScales | None:
    """The same with a scale for each key-value head, where the checkpoint has them; else its one scale, repeated.

    Raises:
        CheckpointError: A scale is not a positive number.
        UnsupportedTensorError: A scale has neither one element nor `kv_heads`.
    """
    found = _found(checkpoint, (TENSOR, CHANNEL), kv_heads)
    if found is None:
        return None
    pairs = {name: tuple(x * kv_heads if len(x) == 1 else x for x in pair) for name, pair in found.items()}
    return {name: (k, v) for name, (k, v) in pairs.items()}


def _found(checkpoint: Checkpoint, granularities: Collection[Granularity], most: int) -> KVHeadScales | None:
    """All scales, each of one element or of `most`."""
    declared = describe(checkpoint).kv
    if declared is not None and (declared.element is not E4M3 or declared.granularity not in granularities):
        _LOG.warning(
            "%s declares a KV cache in %s per %s, which is not simulated; only E4M3 per %s is",
            checkpoint.path,
            declared.element.name,
            declared.granularity,
            " or ".join(map(str, granularities)),
        )
        return None
    found: dict[str, dict[str, Scales]] = {}
    for name in checkpoint.tensors:
        place = kv_scale_of(name)
        if place is not None:
            found.setdefault(place[0], {})[place[1]] = _scale(checkpoint, name, most)
    if declared is None and not found:
        return None
    pairs = {name: tuple(one.get(which, *list(one.values())[-1:]) for which in "kv") for name, one in found.items()}
    return {name: (k, v) for name, (k, v) in pairs.items()}


def _scale(checkpoint: Checkpoint, name: str, most: int) -> Scales:
    info = checkpoint.tensors[name]
    if math.prod(info.shape) not in (1, most) or info.dtype not in TORCH_DTYPES:
        expected = "one scale of the KV cache" + (f", or {most}" if most > 1 else "")
        raise UnsupportedTensorError(
            name, f"expected {expected}, found {info.dtype} {list(info.shape)}; others are not simulated"
        )
    read = torch.from_numpy(checkpoint.read(name)).view(TORCH_DTYPES[info.dtype])
    values = tuple(map(float, read.flatten().tolist()))
    bad = [value for value in values if not 0 < value < math.inf]
    if bad:
        raise CheckpointError(checkpoint.path, f"{name}: a scale is a positive number, found {bad[0]}")
    return values
