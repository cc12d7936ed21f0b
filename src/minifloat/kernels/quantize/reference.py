"""`quantize_rows` and `amax` in plain torch: the functions of `minifloat.numerics.scale` for a slab of raw bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minifloat.kernels.quantize.cpu import Slab
from minifloat.numerics.cast import encode, pack_nibbles
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.scale import cast_stats, choose_scales, effective_scale
from minifloat.numerics.scale_rules import expand

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def amax(data: npt.NDArray[np.uint8], dtype: str) -> tuple[float, int]:
    """Return the amax of the finite elements of `data`, which is not empty, and the number of NaN and Inf."""
    finite, nonfinite = _finite(data, dtype)
    return float(finite.abs().amax()), nonfinite


def quantize_rows(slab: Slab) -> tuple[CastStats, int]:
    """Quantize a slab, NaN and Inf as zeros; return the statistics and the number of NaN and Inf."""
    spec = slab.spec
    finite, nonfinite = _finite(slab.data, slab.dtype)
    w = finite.reshape(slab.shape)
    tensor_amax = None if slab.tensor_amax is None else torch.tensor(slab.tensor_amax, dtype=torch.float32)
    grid, divisor = choose_scales(w, spec, tensor_amax)
    scale = effective_scale(grid, spec, divisor)
    elements = encode(w / expand(scale, spec.granularity, slab.shape), spec.element)
    packed = spec.element.bits * 2 == torch.iinfo(torch.uint8).bits
    slab.codes[...] = (pack_nibbles(elements) if packed else elements).numpy()
    slab.scales[...] = grid.numpy()
    return cast_stats(w, elements, scale, spec), nonfinite


def _finite(data: npt.NDArray[np.uint8], dtype: str) -> tuple[Tensor, int]:
    """Return the elements as float32 ``[n]`` with zeros for NaN and Inf, and the number of NaN and Inf."""
    w = torch.from_numpy(data.reshape(-1).copy()).view(_DTYPES[dtype]).to(torch.float32)
    mask = torch.isfinite(w)
    return torch.where(mask, w, 0.0), int((~mask).sum())
