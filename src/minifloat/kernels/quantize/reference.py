"""`quantize_rows` and `amax` in plain torch: the oracle of `minifloat.quantize`, applied to a slab of raw bytes.

Slow, and several copies of the slab in float32: what runs where the native library was not built, and what that is
tested against. Arguments are validated by the caller, `minifloat.kernels.quantize`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minifloat.numerics.cast import encode
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.pack import pack_nibbles
from minifloat.numerics.scale import cast_stats, choose_scales, effective_scale, expand
from minifloat.numerics.scheme import WeightSpec

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def amax(data: npt.NDArray[np.uint8], dtype: str) -> tuple[float, int]:
    """See `minifloat.kernels.quantize.amax`; `data` is not empty."""
    finite, nonfinite = _finite(data, dtype)
    return float(finite.abs().amax()), nonfinite


def quantize_rows(
    data: npt.NDArray[np.uint8],
    dtype: str,
    shape: tuple[int, int],
    spec: WeightSpec,
    tensor_amax: float | None,
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32] | npt.NDArray[np.uint8],
) -> tuple[CastStats, int]:
    """See `minifloat.kernels.quantize.quantize_rows`; `data` is not empty, `codes` and `scales` are filled.

    NaN and Inf are counted and then taken as zeros.

    Returns:
        The statistics and the number of NaN and Inf.
    """
    finite, nonfinite = _finite(data, dtype)
    w = finite.reshape(shape)
    given = None if tensor_amax is None else torch.tensor(tensor_amax, dtype=torch.float32)
    grid, divisor = choose_scales(w, spec, given)
    scale = effective_scale(grid, spec, divisor)
    elements = encode(w / expand(scale, spec.granularity, shape), spec.element)
    packed = spec.element.bits * 2 == torch.iinfo(torch.uint8).bits
    codes[...] = (pack_nibbles(elements) if packed else elements).numpy()
    scales[...] = grid.numpy()
    return cast_stats(w, elements, scale, spec), nonfinite


def _finite(data: npt.NDArray[np.uint8], dtype: str) -> tuple[Tensor, int]:
    """The elements as float32 ``[n]``, those that are not finite replaced by zero, and how many those were."""
    w = torch.from_numpy(data.reshape(-1).copy()).view(_DTYPES[dtype]).to(torch.float32)
    mask = torch.isfinite(w)
    return torch.where(mask, w, 0.0), int((~mask).sum())
