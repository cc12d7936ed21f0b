"""Inputs rounded to int8: where `linear(int8_inputs=True)` rounds them, and its arithmetic in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.kernels import native
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.pack import PackedWeight
from minifloat.kernels.pack.layout import BLOCK, STEP_COLS
from minifloat.numerics.cast import decode, unpack_nibbles
from minifloat.numerics.formats import BFLOAT16, E2M1, E4M3, FLOAT32
from minifloat.numerics.scale_rules import expand
from minifloat.numerics.tensor import QuantizedTensor

#: The instruction sets that have the kernels.
ISAS = ("avx512_bf16", "avx512_vnni", "avx2")
#: How many times as fast they multiply a prompt as the kernels that do not round (docs/kernels.md).
GAIN = "1.4 to 3"


def why_not(weight: PackedWeight | None = None) -> str:
    """Return why inputs are never rounded to int8; empty if they are."""
    if native.load() is None:
        return native.why_unavailable()
    if native.isa() not in ISAS:
        return f"there are kernels for {', '.join(ISAS)}; this process uses {native.isa()}"
    if weight is None:
        return ""
    form = weight.form
    if form.format is BFLOAT16:
        return "the weight is bfloat16, not quantized"
    if form.grid == BLOCK and form.block[1] % STEP_COLS:
        return f"the weight has scales of {form.block[1]} columns; expected a multiple of {STEP_COLS}"
    return ""


def rounds(weight: PackedWeight, m: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether `linear(int8_inputs=True)` rounds `m` rows of `dtype`: where this is measured to be faster."""
    library = native.load()
    return library is not None and library.rounds_inputs(weight.address, m, DTYPES[dtype])


# A group of a row of `x` has the scale amax / 127. The same group of a row of the weight has a power of two, the
# smallest with which no integer exceeds 127: for E4M3 that of the largest element, for E2M1 that of 6 times the largest
# scale of the blocks that are not all zeros. Integers are rounded to nearest, ties to even, those of NVFP4 away from
# zero; their sums are exact, and are scaled and added up in float32.
# AVX2 takes E2M1 as it is. Elements of E4M3 become integers of at most 2^14 - 1, ties away from zero, before scales of
# blocks multiply them, and `x` of such weights has the scale amax / 2047.

#: Columns that share a scale.
GROUP_COLS = 64
#: The largest integer, on AVX2 those of `x` and of the weight for E4M3, and the smallest amax of a group of `x`.
INT8_MAX, WORD_MAX, E4M3_MAX = 127, 2047, 2**14 - 1
SMALLEST_AMAX = 2.0**-100


def linear(x: Tensor, weight: QuantizedTensor | Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ weight.T + bias`` with `x` and a quantized weight rounded; floats: neither."""
    if isinstance(weight, Tensor):
        inputs, values = x.float(), weight.float()
    else:
        inputs, values = round_inputs(x, largest_input(weight)), round_weight(weight)
    return torch.nn.functional.linear(inputs, values, None if bias is None else bias.float()).to(x.dtype)


def largest_input(weight: QuantizedTensor) -> int:
    """Return the largest integer of the inputs of a weight in this process."""
    return WORD_MAX if native.isa() == "avx2" and weight.spec.element is E4M3 else INT8_MAX


def round_inputs(x: Tensor, largest: int = INT8_MAX) -> Tensor:
    """Return `x` ``[..., K]`` in integers times the scales of its groups, float32; a group with NaN or Inf is NaN."""
    groups = _groups(x.float())
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_AMAX)
    factor = torch.full_like(amax, largest) / amax  # a number over a tensor would be its reciprocal, rounded, times it
    rounded = (groups * factor).round() * (amax / largest)
    return _columns(torch.where(amax.isfinite(), rounded, torch.nan), x.shape[-1])


def round_weight(weight: QuantizedTensor) -> Tensor:
    """Return the weight ``[N, K]`` as it is rounded in this process, times its scales, float32."""
    if native.isa() == "avx2":
        return weight.dequantize() if weight.spec.element is E2M1 else _round_elements(weight)
    spec, shape = weight.spec, weight.shape
    values, scales = _elements(weight), _scales(weight)
    bounds = values.abs()
    factor: Tensor | float = 1.0
    if spec.scale is FLOAT32:  # one for each group: it multiplies the sums
        factor = scales
    else:
        values = values * scales
        bounds = values.abs()
        if spec.element is E2M1:
            blocks = _groups(bounds, spec.granularity.block(shape)[1])
            present = (blocks.amax(-1, keepdim=True) > 0).expand_as(blocks)
            bounds = E2M1.max * scales.abs() * _columns(present, shape[1])
    if weight.global_scale is not None:
        factor = 1 / weight.global_scale if weight.global_divides else weight.global_scale
    unit = _units(bounds, INT8_MAX)
    scaled = _groups(values) / unit
    integers = _away(scaled) if spec.has_global_scale else scaled.round()
    return _columns(torch.where(scaled == 0, 0.0, integers * unit), shape[1]) * factor


def _round_elements(weight: QuantizedTensor) -> Tensor:
    """Return a weight in E4M3 ``[N, K]`` whose elements are rounded as on AVX2, float32."""
    values = _elements(weight)
    unit = _units(values.abs(), E4M3_MAX)
    return _columns(_away(_groups(values) / unit) * unit, weight.shape[1]) * _scales(weight)


def _elements(weight: QuantizedTensor) -> Tensor:
    return decode(unpack_nibbles(weight.codes) if weight.packed else weight.codes, weight.spec.element)


def _scales(weight: QuantizedTensor) -> Tensor:
    scales = weight.scale if weight.spec.scale is FLOAT32 else decode(weight.scale, weight.spec.scale)
    return expand(scales, weight.spec.granularity, weight.shape)


def _units(bounds: Tensor, largest: int) -> Tensor:
    """Return the smallest power of two of each group with which no bound exceeds an integer."""
    mantissa, exponent = torch.frexp(_groups(bounds).amax(-1, keepdim=True) / largest)
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())


def _away(values: Tensor) -> Tensor:
    """Return values rounded to integers, ties away from zero."""
    return (values.abs() + 0.5).floor() * values.sign()


def _groups(matrix: Tensor, cols: int = GROUP_COLS) -> Tensor:
    """Return ``[..., K]`` as ``[..., groups, cols]``, filled up with zeros."""
    padded = torch.nn.functional.pad(matrix, (0, -matrix.shape[-1] % cols))
    return padded.reshape(*matrix.shape[:-1], -1, cols)


def _columns(groups: Tensor, cols: int) -> Tensor:
    return groups.flatten(-2)[..., :cols]
