"""`quantize_rows` and `amax` by the native library (``csrc/quantize``).

Translates a `WeightSpec` into the library's arguments; every number about a format comes from
`numerics/formats.py` this way, the C++ holds none. Arguments are validated by the caller, `minifloat.kernels.quantize`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from minifloat.errors import KernelUnavailable
from minifloat.kernels import native
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.divisor import scalar_global_divisor
from minifloat.numerics.formats import E4M3, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scheme import ScaleRule, WeightSpec

_DTYPES = {"BF16": 0, "F16": 1, "F32": 2}

_FLOAT32_SCALES, _CODED_SCALES, _SEARCH = 0, 1, 5
#: ``enum minifloat_scaling``.
_SCALINGS = {
    (FLOAT32, ScaleRule.AMAX): _FLOAT32_SCALES,
    (E4M3, ScaleRule.AMAX): _CODED_SCALES,
    (E8M0, ScaleRule.FLOOR): 2,
    (E8M0, ScaleRule.EVEN): 3,
    (E8M0, ScaleRule.RCEIL): 4,
    (E8M0, ScaleRule.SEARCH): _SEARCH,
}

#: Elements that the library always handles together (``kLanes``): blocks must be a multiple of them.
_LANES = 16


def why_not(spec: WeightSpec | None) -> str:
    """Why the native library cannot run here, or not for `spec`; empty where it can.

    Raises:
        KernelUnavailable: ``MINIFLOAT_ISA`` names an instruction set that does not exist here.
    """
    if native.load() is None:
        return native.why_unavailable()
    if spec is None:
        return ""
    rows, cols = spec.granularity.rows, spec.granularity.cols
    if (spec.scale, spec.rule) not in _SCALINGS:
        return f"no {spec.scale.name} scales by the rule {spec.rule.value}"
    if spec.rule is ScaleRule.SEARCH and (rows != 1 or cols not in (_LANES, 2 * _LANES)):
        return f"the search covers groups of {_LANES} and {2 * _LANES}, not {spec.granularity}"
    if cols is not None and cols % _LANES:
        return f"blocks must be a multiple of {_LANES} wide, not {spec.granularity}"
    return ""


def amax(data: npt.NDArray[np.uint8], dtype: str) -> tuple[float, int]:
    """See `minifloat.kernels.quantize.amax`; `data` is not empty."""
    args = native.AmaxArgs(data=data.ctypes.data, dtype=_DTYPES[dtype], count=data.nbytes // _itemsize(dtype))
    _library().amax(args)
    return args.amax, args.nonfinite


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

    Returns:
        The statistics and the number of NaN and Inf.
    """
    rows, cols = shape
    block_rows, block_cols = spec.granularity.block(shape)
    args = native.QuantizeRowsArgs(
        data=data.ctypes.data,
        rows=rows,
        cols=cols,
        block_rows=block_rows,
        block_cols=block_cols,
        dtype=_DTYPES[dtype],
        scaling=_SCALINGS[spec.scale, spec.rule],
        element=_format(spec.element),
        zero_scale=2.0**-spec.scale.mantissa_bits,
        one_scale=spec.granularity == TENSOR,
        tensor_amax=0.0 if tensor_amax is None else tensor_amax,
        codes=codes.ctypes.data,
        scales=scales.ctypes.data,
    )
    if spec.has_global_scale and tensor_amax is not None:
        args.scale = _format(spec.scale)
        args.divisor = float(scalar_global_divisor(tensor_amax))
    _library().quantize_rows(args)
    return CastStats(rows * cols, args.signal, args.noise, args.saturated, args.flushed), args.nonfinite


def _library() -> native.Library:
    library = native.load()
    if library is None:
        raise KernelUnavailable(native.why_unavailable())
    return library


def _itemsize(dtype: str) -> int:
    return {"BF16": 2, "F16": 2, "F32": 4}[dtype]


def _format(fmt: ElementFormat) -> native.Format:
    return native.Format(bits=fmt.bits, mantissa_bits=fmt.mantissa_bits, emin=fmt.emin, max=fmt.max)
