"""`quantize_rows` and `amax` by the native library (``csrc/quantize``).

Translates a `WeightSpec` into the library's arguments. Every number about a format comes from `numerics/formats.py`;
the C++ code holds none. The caller, `minifloat.kernels.quantize`, validates the arguments.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from minifloat.kernels import native
from minifloat.kernels.native import structs
from minifloat.kernels.quantize.slab import Slab
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.divisor import scalar_global_divisor
from minifloat.numerics.formats import E4M3, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scheme import ScaleRule, WeightSpec

#: ``enum minifloat_dtype``.
_DTYPES = {"BF16": 0, "F16": 1, "F32": 2}
_ITEM_SIZES = {"BF16": 2, "F16": 2, "F32": 4}

#: ``enum minifloat_scaling``.
_SCALINGS = {
    (FLOAT32, ScaleRule.AMAX): 0,
    (E4M3, ScaleRule.AMAX): 1,
    (E8M0, ScaleRule.FLOOR): 2,
    (E8M0, ScaleRule.EVEN): 3,
    (E8M0, ScaleRule.RCEIL): 4,
    (E8M0, ScaleRule.SEARCH): 5,
    (E4M3, ScaleRule.SEARCH): 6,
}

#: Elements that the library always handles together (``kLanes``): the width of blocks must be a multiple of it.
_LANES = 16


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
    args = structs.AmaxArgs(data=data.ctypes.data, dtype=_DTYPES[dtype], count=data.nbytes // _ITEM_SIZES[dtype])
    native.require().amax(args)
    return args.amax, args.nonfinite


def quantize_rows(slab: Slab) -> tuple[CastStats, int]:
    """Quantize a slab; return the statistics and the number of NaN and Inf."""
    spec = slab.spec
    rows, cols = slab.shape
    block_rows, block_cols = spec.granularity.block(slab.shape)
    args = structs.QuantizeRowsArgs(
        data=slab.data.ctypes.data,
        rows=rows,
        cols=cols,
        block_rows=block_rows,
        block_cols=block_cols,
        dtype=_DTYPES[slab.dtype],
        scaling=_SCALINGS[spec.scale, spec.rule],
        element=_format(spec.element),
        zero_scale=2.0**-spec.scale.mantissa_bits,
        one_scale=spec.granularity == TENSOR,
        tensor_amax=0.0 if slab.tensor_amax is None else slab.tensor_amax,
        codes=slab.codes.ctypes.data,
        scales=slab.scales.ctypes.data,
    )
    if spec.has_global_scale and slab.tensor_amax is not None:
        args.scale = _format(spec.scale)
        args.divisor = float(scalar_global_divisor(slab.tensor_amax))
    native.require().quantize_rows(args)
    return CastStats(rows * cols, args.signal, args.noise, args.saturated, args.flushed), args.nonfinite


def _format(fmt: ElementFormat) -> structs.Format:
    return structs.Format(bits=fmt.bits, mantissa_bits=fmt.mantissa_bits, emin=fmt.emin, max=fmt.max)
