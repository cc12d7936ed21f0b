"""`quantize_inputs` on a GPU in one kernel, bit for bit as `numerics/activation.py`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.kernels.triton_cast import (
    INF_BITS,
    LARGEST_QUOTIENT,
    MAGNITUDE,
    OPTIONS,
    bits_of,
    code_of,
    divide,
    division_terms,
    float_of,
    float_scales,
    load_bits,
    round_magnitude,
    rounds_e4m3,
    sign_of,
    with_sign,
)
from minifloat.numerics.formats import E4M3, FLOAT32, ElementFormat
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scale_rules import amax
from minifloat.numerics.scale_rules import float_scales as scales_of
from minifloat.numerics.scheme import ActivationSpec

#: Elements that a program holds at a time: for small groups, and at most.
_TILE = 2048
_LARGEST_TILE = 8192
#: Elements that a thread holds at a time.
_PER_THREAD = 16


def why_not(spec: ActivationSpec) -> str:
    """Return why the kernel does not cover `spec`; empty if it does."""
    if spec.scale is not FLOAT32:
        return f"it computes float32 scales, not {spec.scale.name} scales"
    cols = spec.granularity.cols
    if cols is not None and (cols & (cols - 1) or cols > _TILE):
        return f"groups must be a power of two wide, at most {_TILE}, not {spec.granularity}"
    return ""


@triton.jit
def quantize_groups(
    x_ptr,
    codes_ptr,
    scales_ptr,
    given_ptr,
    rows,
    cols,
    groups,
    total,
    x_stride,
    scale_row_stride,
    scale_col_stride,
    BF16: tl.constexpr,
    GIVEN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    LARGEST: tl.constexpr,
    ELEMENT_MANTISSA: tl.constexpr,
    ELEMENT_BIAS: tl.constexpr,
    ELEMENT_SIGN: tl.constexpr,
    HARDWARE: tl.constexpr,
    NAN_CODE: tl.constexpr,
):
    index = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, group = (index // groups).to(tl.int64), index % groups
    col = (group * GROUP)[:, None] + tl.arange(0, CHUNK)[None, :]
    exists = (index < total)[:, None]
    inside = exists & (row < rows)[:, None]
    chunks = 1 if WHOLE else tl.cdiv(cols, CHUNK)
    first = load_bits(x_ptr, row[:, None] * x_stride + col, inside & (col < cols), BF16)
    if GIVEN:
        scale = tl.zeros([GROUPS], tl.float32) + tl.load(given_ptr)
    else:
        largest = tl.max(first & MAGNITUDE, 1)
        if not WHOLE:
            for chunk in range(1, chunks):
                at = col + chunk * CHUNK
                bits = load_bits(x_ptr, row[:, None] * x_stride + at, inside & (at < cols), BF16)
                largest = tl.maximum(largest, tl.max(bits & MAGNITUDE, 1))
        # As integers, the bits of NaN are larger than those of Inf, and those larger than all numbers.
        scale = float_scales(float_of(largest), LARGEST)
        tl.store(scales_ptr + row * scale_row_stride + group * scale_col_stride, scale, index < total)
    factor, divisor, inverse = division_terms(scale)
    limit = (divisor * LARGEST_QUOTIENT)[:, None]
    factor, divisor, inverse = factor[:, None], divisor[:, None], inverse[:, None]
    for chunk in range(chunks):
        at = col + chunk * CHUNK
        bits = first
        if not WHOLE:
            bits = load_bits(x_ptr, row[:, None] * x_stride + at, inside & (at < cols), BF16)
        dividend = float_of(bits & MAGNITUDE) * factor
        if GIVEN:  # a comparison, because the minimum with NaN is a number
            dividend = tl.where(dividend > limit, limit, dividend)
        quotient = divide(dividend, divisor, inverse)
        if HARDWARE:
            code = with_sign(quotient, bits).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            value = round_magnitude(quotient, ELEMENT_MANTISSA, ELEMENT_BIAS, LARGEST, 1.0, True)
            code = (code_of(value, ELEMENT_MANTISSA, ELEMENT_BIAS) | (sign_of(bits) << ELEMENT_SIGN)).to(tl.uint8)
        code = tl.where((bits_of(quotient) & MAGNITUDE) > INF_BITS, NAN_CODE, code)
        tl.store(codes_ptr + row[:, None] * cols + at, code.to(tl.uint8), exists & (at < cols))


def quantize_inputs(x: Tensor, spec: ActivationSpec, scale: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    """Implement `minifloat.kernels.inputs.quantize_inputs`; `rows` is the number of rows of the codes."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    cols = x.shape[1]
    width = spec.granularity.cols or cols
    groups = -(-cols // width) if cols else 0
    if scale is None and spec.granularity == TENSOR:  # needs the whole tensor before any program rounds
        scale = scales_of(amax(x, TENSOR), spec.element)
    codes = torch.empty(rows, cols, dtype=torch.uint8, device=x.device)
    if scale is None:
        grid = torch.empty(groups, rows, dtype=torch.float32, device=x.device).t()
        static_scale = grid
    else:
        static_scale = scale.to(x.device, torch.float32).reshape(1, 1)
        grid = static_scale
    total = rows * groups
    if total and cols:
        source = x.view(torch.int16) if x.dtype == torch.bfloat16 else x
        arguments = kernel_arguments(spec, x.dtype, cols, given=scale is not None, rounds_e4m3=rounds_e4m3(x.device))
        with torch.cuda.device_of(x):
            quantize_groups[(-(-total // arguments["GROUPS"]),)](
                source, codes, grid, static_scale, x.shape[0], cols, groups, total, x.stride(0), *grid.stride(),
                **arguments, **options(arguments),
            )  # fmt: skip
    return codes, grid


def options(arguments: dict[str, Any]) -> dict[str, Any]:
    elements = arguments["GROUPS"] * arguments["CHUNK"]
    return {"num_warps": min(max(elements // (32 * _PER_THREAD), 1), 16), **OPTIONS}


def kernel_arguments(
    spec: ActivationSpec, dtype: torch.dtype, cols: int, *, given: bool, rounds_e4m3: bool = False
) -> dict[str, Any]:
    """Return the constants that `quantize_groups` is compiled with."""
    element: ElementFormat = spec.element
    width = spec.granularity.cols or 0
    chunk = width or min(1 << max(cols - 1, 1).bit_length(), _LARGEST_TILE)
    return {
        "BF16": dtype == torch.bfloat16,
        "GIVEN": given,
        "GROUP": width,
        "GROUPS": max(_TILE // chunk, 1),
        "CHUNK": chunk,
        "WHOLE": chunk >= (width or cols),
        "LARGEST": element.max,
        "ELEMENT_SIGN": element.bits - 1,
        "NAN_CODE": element.nan_code,
        "ELEMENT_MANTISSA": element.mantissa_bits,
        "ELEMENT_BIAS": element.bias,
        "HARDWARE": rounds_e4m3 and element is E4M3,
    }
