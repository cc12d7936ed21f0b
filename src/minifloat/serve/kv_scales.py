"""The scales of an FP8 KV cache that a checkpoint brings: what its keys and values were divided by."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping

import torch

from minifloat.checkpoint import Checkpoint
from minifloat.errors import CheckpointError, UnsupportedTensorError
from minifloat.formats import E4M3
from minifloat.granularity import TENSOR
from minifloat.layouts import describe
from minifloat.serve.load import TORCH_DTYPES

_LOG = logging.getLogger(__name__)

#: (k_scale, v_scale) by the name of the attention module in the checkpoint; they multiply to dequantize.
KVScales = Mapping[str, tuple[float, float]]

#: Scales stand at the attention module (compressed-tensors) or at its projections (ModelOpt); `output_scale` is older.
_SCALE_NAME = re.compile(r"(.+?)(?:\.([kv])_proj)?\.(?:([kv])_scale|output_scale)")


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
    declared = describe(checkpoint).kv
    if declared is not None and (declared.element is not E4M3 or declared.granularity != TENSOR):
        _LOG.warning(
            "%s declares a KV cache in %s per %s, which is not simulated; only E4M3 per tensor is",
            checkpoint.path,
            declared.element.name,
            declared.granularity,
        )
        return None
    found: dict[str, dict[str, float]] = {}
    for name in checkpoint.tensors:
        match = _SCALE_NAME.fullmatch(name)
        if match and (which := match[3] or match[2]):
            found.setdefault(match[1], {})[which] = _scale(checkpoint, name)
    if declared is None and not found:
        return None
    pairs = {name: tuple(one.get(which, *list(one.values())[-1:]) for which in "kv") for name, one in found.items()}
    return {name: (k, v) for name, (k, v) in pairs.items()}


def _scale(checkpoint: Checkpoint, name: str) -> float:
    info = checkpoint.tensors[name]
    if math.prod(info.shape) != 1 or info.dtype not in TORCH_DTYPES:
        raise UnsupportedTensorError(
            name, f"expected one scale of the KV cache, found {info.dtype} {list(info.shape)}; others are not simulated"
        )
    value = float(torch.from_numpy(checkpoint.read(name)).view(TORCH_DTYPES[info.dtype]))
    if not 0 < value < math.inf:
        raise CheckpointError(checkpoint.path, f"{name}: a scale is a positive number, found {value}")
    return value
