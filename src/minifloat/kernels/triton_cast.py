"""Rounding to formats of at most 8 bits inside Triton kernels, bit for bit as `numerics/cast.py` and `scale.py`."""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
import triton
import triton.language as tl

from minifloat.kernels import triton_runtime
from minifloat.numerics.formats import FLOAT32, ElementFormat

# Every step is integer arithmetic on the bits of float32, or one operation that IEEE 754 defines. Two things would
# change bits: multiply-adds that the compiler fuses by itself, and approximate division (`tl.div_rn` or `divide` is
# exact).
#: Options of every launch of a kernel that rounds.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}

# Globals of a kernel must be constexpr; mypy sees the values that they hold.
_MANTISSA: Any = tl.constexpr(FLOAT32.mantissa_bits)
_ONE: Any = tl.constexpr(1)  # the interpreter cannot shift a plain number by a constexpr
_BIAS: Any = tl.constexpr(FLOAT32.bias)
_SIGN: Any = tl.constexpr(FLOAT32.bits - 1)
_INTERPRETED: Any = tl.constexpr(triton_runtime.is_interpreted())
MAGNITUDE: Any = tl.constexpr((1 << (FLOAT32.bits - 1)) - 1)
INF_BITS: Any = tl.constexpr(FLOAT32.max_code + 1)
_MIN_NORMAL_BITS: Any = tl.constexpr(1 << FLOAT32.mantissa_bits)
#: Scales outside of this range are brought near it before a division.
_SMALL: Any = tl.constexpr(2.0**-40)
_LARGE: Any = tl.constexpr(2.0**40)
_UP: Any = tl.constexpr(2.0**64)
_DOWN: Any = tl.constexpr(2.0**-64)
#: Larger quotients are larger than the largest element of any format.
LARGEST_QUOTIENT: Any = tl.constexpr(2.0**20)
_EPSILON: Any = tl.constexpr(2.0**-FLOAT32.mantissa_bits)


def constants(fmt: ElementFormat, prefix: str) -> dict[str, int]:
    """Return the constants of a format that the functions below take, as arguments of a kernel."""
    largest = int.from_bytes(struct.pack("<f", fmt.max), "little")
    return {f"{prefix}_MANTISSA": fmt.mantissa_bits, f"{prefix}_BIAS": fmt.bias, f"{prefix}_MAX": largest}


@functools.cache
def rounds_e4m3(device: torch.device) -> bool:
    """Return whether kernels on `device` may round float32 to E4M3 by the instruction of compute capability 8.9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def load_bits(pointer, offsets, mask, BF16: tl.constexpr):
    """Load elements as bits of float32, zero where `mask` is false; bfloat16 comes as int16 and is shifted."""
    if BF16:
        return tl.load(pointer + offsets, mask, 0).to(tl.int32) << 16
    return bits_of(tl.load(pointer + offsets, mask, 0.0).to(tl.float32))


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_magnitude(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):
    """Encode magnitudes as `cast.encode` does: to nearest, ties to even, clamped; NaN gets the largest value's code."""
    SHIFT: tl.constexpr = _MANTISSA - MANTISSA
    SMALLEST_NORMAL: tl.constexpr = (_BIAS - BIAS + 1) << _MANTISSA
    MAGIC: tl.constexpr = 2.0 ** (_MANTISSA + 1 - BIAS - MANTISSA)
    MAGIC_BITS: tl.constexpr = (_BIAS + _MANTISSA + 1 - BIAS - MANTISSA) << _MANTISSA
    magnitude = tl.minimum(magnitude, MAX)
    rounded = magnitude + ((_ONE << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)
    normal = (rounded >> SHIFT) - ((_BIAS - BIAS) << MANTISSA)
    subnormal = bits_of(float_of(magnitude) + MAGIC) - MAGIC_BITS
    return tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)


@triton.jit
def fused(a, b, c):
    """Return ``a * b + c`` of float32 numbers, rounded once."""
    if _INTERPRETED:  # it would round twice; in float64 the product is exact
        return (a.to(tl.float64) * b + c).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def divide(w, divisor, inverse):
    """Return ``w / divisor`` as IEEE 754 rounds it, in five operations; a zero may lose its sign."""
    # Markstein, Computation of elementary functions on the IBM RISC System/6000, 1990, theorem 2: the first quotient is
    # off by up to 1.5 units in the last place, the second by less than one, and the third is the rounded one.
    quotient = w * inverse
    quotient = fused(fused(quotient, -divisor, w), inverse, quotient)
    return fused(fused(quotient, -divisor, w), inverse, quotient)


@triton.jit
def division_terms(scale):
    """Return a factor for dividends, a divisor and its inverse: ``divide`` then divides by any `scale` > 0."""
    # By Inf, finite numbers give 0 and Inf gives NaN; by NaN, everything gives NaN.
    factor = tl.where(scale < _SMALL, _UP, tl.where(scale > _LARGE, _DOWN, 1.0))
    divisor = scale * factor
    is_number = bits_of(scale) < INF_BITS
    factor = tl.where(is_number, factor, scale - scale)  # Inf - Inf is NaN
    factor = tl.where(bits_of(scale) == INF_BITS, 0.0, factor)
    divisor = tl.where(is_number, divisor, 1.0)
    return factor, divisor, tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)


@triton.jit
def round_magnitude(
    x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, STEP: tl.constexpr, CLAMP: tl.constexpr
):
    """Round float32 numbers >= 0 to the nearest values of a format times `STEP`, ties to even."""
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS) * STEP
    MAGIC: tl.constexpr = 2.0 ** (_MANTISSA - MANTISSA)
    if CLAMP:
        x = tl.minimum(x, LARGEST * STEP)
    power = tl.maximum(float_of(bits_of(x) & INF_BITS), SMALLEST_NORMAL)
    return fused(power, -MAGIC, fused(power, MAGIC, x))


@triton.jit
def code_of(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the int32 code of a float32 >= 0 that is a value of the format."""
    SHIFT: tl.constexpr = _MANTISSA - MANTISSA
    DOWN: tl.constexpr = 2.0 ** (BIAS - _BIAS)
    return bits_of(value * DOWN) >> SHIFT


@triton.jit
def decode_magnitude(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Decode an int32 code without a sign to float32; the code is not NaN."""
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA)
    normal = float_of((code << (_MANTISSA - MANTISSA)) + ((_BIAS - BIAS) << _MANTISSA))
    return tl.where(code < (_ONE << MANTISSA), code.to(tl.float32) * SMALLEST, normal)


@triton.jit
def with_sign(magnitude, bits):
    """Give a float32 >= 0 the sign of `bits`."""
    return float_of(bits_of(magnitude) | (bits & ~MAGNITUDE))


@triton.jit
def sign_of(bits):
    """Return the sign bit of float32 bits: 0 or 1."""
    return (bits >> _SIGN) & 1


@triton.jit
def float_scales(amax, LARGEST: tl.constexpr):
    """Compute float32 scales as `scale.float_scales` does: amax over the largest element; NaN and Inf stay."""
    bits = bits_of(tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))) & MAGNITUDE
    scale = float_of(tl.maximum(bits, _MIN_NORMAL_BITS))
    return tl.where(amax == 0.0, _EPSILON, scale)


@triton.jit
def decode_e8m0(code):
    """Return 2**(code - bias) as float32, a subnormal for code 0; `code` is int32 and not NaN."""
    return float_of(tl.where(code == 0, _ONE << (_MANTISSA - 1), code << _MANTISSA))


@triton.jit
def inverse_of_power(power):
    """Return ``1 / power`` of powers of two from 2**-127 to 2**127, float32."""
    bits = bits_of(power)
    return decode_e8m0(tl.where(bits < _MIN_NORMAL_BITS, 2 * _BIAS, 2 * _BIAS - (bits >> _MANTISSA)))
