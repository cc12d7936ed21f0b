"""Scales of blocks in the Triton quantizer, bit for bit as `numerics/scale_rules.py` and `numerics/scale_rules.py`."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from minifloat.kernels.triton_cast import (
    MAGNITUDE,
    bits_of,
    decode_e8m0,
    decode_magnitude,
    encode_magnitude,
    float_scales,
    round_magnitude,
)
from minifloat.numerics.formats import E8M0, FLOAT32

#: Values of SCALING: how scales are computed.
FLOAT_SCALES: Any = tl.constexpr(0)
CODED_SCALES: Any = tl.constexpr(1)
FLOOR: Any = tl.constexpr(2)
EVEN: Any = tl.constexpr(3)
RCEIL: Any = tl.constexpr(4)
SEARCH: Any = tl.constexpr(5)
CODED_SEARCH: Any = tl.constexpr(6)
FLOAT_RCEIL: Any = tl.constexpr(7)

_MANTISSA: Any = tl.constexpr(FLOAT32.mantissa_bits)
_ONE: Any = tl.constexpr(1)  # the interpreter cannot shift a plain number by a constexpr
_LAST_MANTISSA: Any = tl.constexpr((1 << FLOAT32.mantissa_bits) - 1)
_LARGEST_E8M0: Any = tl.constexpr(E8M0.max_code)
_E8M0_BIAS: Any = tl.constexpr(E8M0.bias)


@triton.jit
def _block_error(
    y,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    STEP: tl.constexpr,
    CLAMP: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Compute `scale_search._block_error` of magnitudes ``[PARTS, BLOCKS, VECTOR]``, in its order of additions."""
    d = y - round_magnitude(y, MANTISSA, BIAS, LARGEST, STEP, CLAMP)
    error = d * d
    for level in tl.static_range(_log2(PARTS)):
        error = tl.sum(tl.reshape(error, [2, PARTS >> (level + 1), BLOCKS, VECTOR]), 0)
    error = tl.reshape(error, [BLOCKS, VECTOR])
    for level in tl.static_range(_log2(VECTOR)):
        error = tl.sum(tl.reshape(error, [BLOCKS, 2, VECTOR >> (level + 1)]), 1)
    return tl.reshape(error, [BLOCKS])


@triton.constexpr_function
def _log2(number):
    return number.bit_length() - 1


@triton.jit
def _search(
    w,
    amax,
    EMAX: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Compute `scale_search.search_e8m0_scales` with the offsets in the order of `SEARCH_OFFSETS`: 0, 1, -1."""
    floor = tl.maximum((bits_of(amax) >> _MANTISSA) - EMAX, 0)
    y = w * decode_e8m0(-(floor - 2 * _E8M0_BIAS))[None, :, None]  # in the interpreter a constexpr cannot stand first
    error = _block_error(y, BLOCKS, PARTS, VECTOR, 1.0, True, MANTISSA, BIAS, LARGEST)
    # y is below 2**(EMAX + 1), so that half of it is not clamped.
    above = _block_error(y, BLOCKS, PARTS, VECTOR, 2.0, False, MANTISSA, BIAS, LARGEST)
    below = _block_error(y, BLOCKS, PARTS, VECTOR, 0.5, True, MANTISSA, BIAS, LARGEST)
    code = tl.where(above < error, floor + 1, floor)
    return tl.where((below < tl.minimum(above, error)) & (floor > 0), floor - 1, code)


@triton.jit
def _search_codes(
    x,
    first,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE_MANTISSA: tl.constexpr,
    SCALE_BIAS: tl.constexpr,
    LAST_CODE: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """Compute `scale_search.search_nvfp4_scales`."""
    best_code, best_error = first, tl.full(first.shape, float("inf"), tl.float32)
    for index in tl.static_range(len(OFFSETS)):
        code = tl.minimum(tl.maximum(first + OFFSETS[index], 1), LAST_CODE)
        value = decode_magnitude(code, SCALE_MANTISSA, SCALE_BIAS)
        inverse = tl.div_rn(tl.full(value.shape, 1.0, tl.float32), value)
        y = x * inverse[None, :, None]
        error = _block_error(y, BLOCKS, PARTS, VECTOR, 1.0, True, MANTISSA, BIAS, LARGEST) * (value * value)
        better = error < best_error
        best_code, best_error = tl.where(better, code, best_code), tl.where(better, error, best_error)
    return best_code


@triton.jit
def _e8m0(amax, SCALING: tl.constexpr, LARGEST: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr):
    """Compute `scale_rules.e8m0_scales`."""
    if SCALING == FLOOR:
        code = (bits_of(amax) >> _MANTISSA) - EMAX
    elif SCALING == EVEN:
        code = ((bits_of(amax) + (_ONE << (_MANTISSA - MANTISSA - 1))) >> _MANTISSA) - EMAX
    else:
        bits = bits_of(tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32)))
        code = (bits >> _MANTISSA) + ((bits & _LAST_MANTISSA) != 0).to(tl.int32)
    return tl.minimum(tl.maximum(code, 0), _LARGEST_E8M0)


@triton.jit
def block_scales(
    w,
    amax,
    divisor,
    SCALING: tl.constexpr,
    ZERO_SCALE: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    LARGEST: tl.constexpr,
    EMAX: tl.constexpr,
    ELEMENT_MANTISSA: tl.constexpr,
    ELEMENT_BIAS: tl.constexpr,
    SCALE_MANTISSA: tl.constexpr,
    SCALE_BIAS: tl.constexpr,
    SCALE_MAX: tl.constexpr,
    LAST_SCALE: tl.constexpr,
    SCALE_OFFSETS: tl.constexpr,
):
    if SCALING == FLOAT_SCALES or SCALING == FLOAT_RCEIL:  # noqa: SIM109 (Triton has no `in`)
        factor = float_scales(amax, LARGEST)
        if SCALING == FLOAT_RCEIL:
            factor = ((bits_of(factor) + _LAST_MANTISSA) & ~_LAST_MANTISSA).to(tl.float32, bitcast=True)
        stored = factor
    elif SCALING == CODED_SCALES or SCALING == CODED_SEARCH:  # noqa: SIM109 (Triton has no `in`)
        unrounded = divisor * tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
        rounded = encode_magnitude(bits_of(unrounded) & MAGNITUDE, SCALE_MANTISSA, SCALE_BIAS, SCALE_MAX)
        stored = tl.where(amax == 0.0, ZERO_SCALE, tl.maximum(rounded, 1))
        if SCALING == CODED_SEARCH:
            stored = _search_codes(
                w * divisor,
                stored,
                BLOCKS,
                PARTS,
                VECTOR,
                ELEMENT_MANTISSA,
                ELEMENT_BIAS,
                LARGEST,
                SCALE_MANTISSA,
                SCALE_BIAS,
                LAST_SCALE,
                SCALE_OFFSETS,
            )
        value = decode_magnitude(stored, SCALE_MANTISSA, SCALE_BIAS)
        factor = tl.div_rn(value, tl.full(amax.shape, 0.0, tl.float32) + divisor)
    else:
        if SCALING == SEARCH:
            stored = _search(w, amax, EMAX, BLOCKS, PARTS, VECTOR, ELEMENT_MANTISSA, ELEMENT_BIAS, LARGEST)
        else:
            stored = _e8m0(amax, SCALING, LARGEST, EMAX, ELEMENT_MANTISSA)
        factor = decode_e8m0(stored)
    return stored, factor
