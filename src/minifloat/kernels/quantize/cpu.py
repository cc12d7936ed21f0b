"""`quantize_rows` and `amax` by the native library (``csrc/quantize``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minifloat.kernels import native
from minifloat.kernels.native import CONSTANTS, STRUCTS, format_struct
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.divisor import scalar_global_divisor
from minifloat.numerics.formats import E4M3, E8M0, FLOAT32
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scheme import ScaleRule, WeightSpec

_DTYPES = {name: CONSTANTS[name] for name in ("BF16", "F16", "F32")}
_ITEM_SIZES = {"BF16": 2, "F16": 2, "F32": 4}

_SCALINGS = {
    (FLOAT32, ScaleRule.AMAX): CONSTANTS["SCALE_FLOAT32"],
    (FLOAT32, ScaleRule.RCEIL): CONSTANTS["SCALE_FLOAT32_RCEIL"],
    (E4M3, ScaleRule.AMAX): CONSTANTS["SCALE_CODED"],
    (E8M0, ScaleRule.FLOOR): CONSTANTS["SCALE_FLOOR"],
    (E8M0, ScaleRule.EVEN): CONSTANTS["SCALE_EVEN"],
    (E8M0, ScaleRule.RCEIL): CONSTANTS["SCALE_RCEIL"],
    (E8M0, ScaleRule.SEARCH): CONSTANTS["SCALE_SEARCH"],
    (E4M3, ScaleRule.SEARCH): CONSTANTS["SCALE_CODED_SEARCH"],
}

#: Elements that the library always handles together (``kLanes``): the width of blocks must be a multiple of it.
_LANES = 16


@dataclass(frozen=True)
class Slab:
    """A slab of rows and the arrays that its quantization fills: validated arguments of every implementation."""

    data: npt.NDArray[np.uint8]  #: uint8, contiguous, not empty: the bytes of the slab
    dtype: str
    shape: tuple[int, int]
    spec: WeightSpec
    tensor_amax: float | None  #: the amax of the whole tensor if ``spec.needs_tensor_amax``, else None
    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32] | npt.NDArray[np.uint8]


def why_not(spec: WeightSpec | None) -> str:
    """Return why the native library cannot run here or does not cover `spec`; empty if it can."""
    if native.load() is None:
        return native.why_unavailable()
    if spec is None:
        return ""
    rows, cols = spec.granularity.rows, spec.granularity.cols
    if (spec.scale, spec.rule) not in _SCALINGS:
        return f"no {spec.scale.name} scales by the rule {spec.rule.value}"
    searched = (_LANES,) if spec.scale is E4M3 else (_LANES, 2 * _LANES)
    if spec.rule is ScaleRule.SEARCH and (rows != 1 or cols not in searched):
        return f"the search covers groups of {' and '.join(map(str, searched))}, not {spec.granularity}"
    if cols is not None and cols % _LANES:
        return f"blocks must be a multiple of {_LANES} wide, not {spec.granularity}"
    return ""


def amax(data: npt.NDArray[np.uint8], dtype: str) -> tuple[float, int]:
    """Return the amax of the finite elements of `data`, which is not empty, and the number of NaN and Inf."""
    args = STRUCTS["amax_args"](data=data.ctypes.data, dtype=_DTYPES[dtype], count=data.nbytes // _ITEM_SIZES[dtype])
    native.require().call("amax", args)
    return args.amax, args.nonfinite


def quantize_rows(slab: Slab) -> tuple[CastStats, int]:
    """Quantize a slab; return the statistics and the number of NaN and Inf."""
    spec = slab.spec
    rows, cols = slab.shape
    block_rows, block_cols = spec.granularity.block(slab.shape)
    args = STRUCTS["quantize_rows_args"](
        data=slab.data.ctypes.data,
        rows=rows,
        cols=cols,
        block_rows=block_rows,
        block_cols=block_cols,
        dtype=_DTYPES[slab.dtype],
        scaling=_SCALINGS[spec.scale, spec.rule],
        element=format_struct(spec.element),
        zero_scale=2.0**-spec.scale.mantissa_bits,
        one_scale=spec.granularity == TENSOR,
        tensor_amax=0.0 if slab.tensor_amax is None else slab.tensor_amax,
        codes=slab.codes.ctypes.data,
        scales=slab.scales.ctypes.data,
    )
    if spec.has_global_scale:
        args.scale = format_struct(spec.scale)
        args.divisor = float(scalar_global_divisor(slab.tensor_amax or 0.0))
    native.require().call("quantize_rows", args)
    return CastStats(rows * cols, args.signal, args.noise, args.saturated, args.flushed), args.nonfinite
