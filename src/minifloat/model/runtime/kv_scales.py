"""The scales of an FP8 KV cache that a checkpoint brings: keys and values were divided by them."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping

import torch

from minifloat.checkpoint import Checkpoint
from minifloat.errors import CheckpointError, UnsupportedTensorError
from minifloat.model.layouts import Description
from minifloat.model.layouts.stored import kv_scale_of
from minifloat.model.runtime.tensors import TORCH_DTYPES
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import CHANNEL, TENSOR, Granularity

_LOG = logging.getLogger(__name__)

#: (k_scale, v_scale) by the name of the attention module in the checkpoint; they multiply to dequantize.
KVScales = Mapping[str, tuple[float, float]]
Scales = tuple[float, ...]
#: The same, one scale for each key-value head.
KVHeadScales = Mapping[str, tuple[Scales, Scales]]


def kv_scales(checkpoint: Checkpoint, description: Description) -> KVScales | None:
    """Return the scales of a checkpoint's FP8 KV cache, one for each layer's keys and one for its values."""
    found = _read_scales(checkpoint, description, (TENSOR,), 1)
    return None if found is None else {name: (k[0], v[0]) for name, (k, v) in found.items()}


def kv_head_scales(checkpoint: Checkpoint, description: Description, kv_heads: int) -> KVHeadScales | None:
    """Return the scales of a checkpoint's FP8 KV cache for each key-value head."""
    found = _read_scales(checkpoint, description, (TENSOR, CHANNEL), kv_heads)
    if found is None:
        return None
    pairs = {name: tuple(x * kv_heads if len(x) == 1 else x for x in pair) for name, pair in found.items()}
    return {name: (k, v) for name, (k, v) in pairs.items()}


def _read_scales(
    checkpoint: Checkpoint, description: Description, granularities: Collection[Granularity], most: int
) -> KVHeadScales | None:
    declared = description.kv
    if declared is not None and (declared.element is not E4M3 or declared.granularity not in granularities):
        _LOG.warning(
            "%s declares a KV cache in %s per %s, which is not simulated; only E4M3 per %s is",
            checkpoint.path,
            declared.element.name,
            declared.granularity,
            " or ".join(map(str, granularities)),
        )
        return None
    scales: dict[str, dict[str, Scales]] = {}
    for name in checkpoint.tensors:
        scale_of = kv_scale_of(name)
        if scale_of is not None:
            attention, projection = scale_of
            scales.setdefault(attention, {})[projection] = _scale(checkpoint, name, most)
    if declared is None and not scales:
        return None
    return {name: (pair.get("k") or pair["v"], pair.get("v") or pair["k"]) for name, pair in scales.items()}


def _scale(checkpoint: Checkpoint, name: str, most: int) -> Scales:
    info = checkpoint.tensors[name]
    if math.prod(info.shape) not in (1, most) or info.dtype not in TORCH_DTYPES:
        expected = "one scale of the KV cache" + (f", or {most}" if most > 1 else "")
        raise UnsupportedTensorError(
            name, f"expected {expected}, found {info.dtype} {list(info.shape)}; others are not simulated"
        )
    tensor = torch.from_numpy(checkpoint.read(name)).view(TORCH_DTYPES[info.dtype])
    values = tuple(map(float, tensor.flatten().tolist()))
    bad = [value for value in values if not 0 < value < math.inf]
    if bad:
        raise CheckpointError(checkpoint.path, f"{name}: a scale is a positive number, found {bad[0]}")
    return values
