"""Rounding to formats of at most 8 bits inside Triton kernels, bit for bit as `numerics/cast.py` and `scale.py`.

Every step is integer arithmetic on the bits of float32, or one float32 operation that IEEE 754 defines. Hardware casts
are not used: only some architectures have them, and Triton's interpreter, which the tests run, gets them wrong. Two
things would change bits and are prevented: fused multiply-adds (every launch passes `OPTIONS`) and approximate division
(kernels use `tl.div_rn`, not the operator). Imports triton; `triton_runtime` tells whether it is installed.
"""

from __future__ import annotations

import struct
from typing import Any

import triton
import triton.language as tl

from minifloat.numerics.formats import FLOAT32, ElementFormat

#: Options of every launch of a kernel that rounds.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}

# Globals of a kernel must be constexpr; mypy sees the values that they hold.
_MANTISSA: Any = tl.constexpr(FLOAT32.mantissa_bits)
_ONE: Any = tl.constexpr(1)  # the interpreter cannot shift a plain number by a constexpr
_BIAS: Any = tl.constexpr(FLOAT32.bias)
_SIGN: Any = tl.constexpr(FLOAT32.bits - 1)
MAGNITUDE: Any = tl.constexpr((1 << (FLOAT32.bits - 1)) - 1)
INF_BITS: Any = tl.constexpr(FLOAT32.max_code + 1)
_MIN_NORMAL_BITS: Any = tl.constexpr(1 << FLOAT32.mantissa_bits)
_EPSILON: Any = tl.constexpr(2.0**-FLOAT32.mantissa_bits)


def constants(fmt: ElementFormat, prefix: str) -> dict[str, int]:
    """Return the constants of a format that the functions below take, as arguments of a kernel.

    Args:
        fmt: A format of at most 8 bits.
        prefix: Prefix of the names: ``{prefix}_MANTISSA``, ``{prefix}_BIAS``, ``{prefix}_MAX``.
    """
    largest = int.from_bytes(struct.pack("<f", fmt.max), "little")
    return {f"{prefix}_MANTISSA": fmt.mantissa_bits, f"{prefix}_BIAS": fmt.bias, f"{prefix}_MAX": largest}


@triton.jit
def load_bits(pointer, offsets, mask, BF16: tl.constexpr):
    """Load elements as bits of float32, zero where `mask` is false; bfloat16 comes as int16 and is shifted."""
    if BF16:
        return tl.load(pointer + offsets, mask, 0).to(tl.int32) << 16
    return bits_of(tl.load(pointer + offsets, mask, 0.0).to(tl.float32))


@triton.jit
def bits_of(x):
    """Return the bits of a float32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """Return the float32 with the bits of an int32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_magnitude(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):
    """Encode magnitudes as `cast.encode` does: to nearest, ties to even, clamped; NaN gets the largest value's code.

    Args:
        magnitude: int32, bits of float32 without the sign.
        MANTISSA: Mantissa bits of the format.
        BIAS: Exponent bias of the format.
        MAX: Bits of the largest value of the format as float32.

    Returns:
        Codes, int32.
    """
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
    """Compute float32 scales as `scale.float_scales` does: amax over the largest element; NaN and Inf stay as they are.

    Args:
        amax: float32 >= 0, or NaN.
        LARGEST: The largest value of the element format, a float.
    """
    bits = bits_of(tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))) & MAGNITUDE
    scale = float_of(tl.maximum(bits, _MIN_NORMAL_BITS))
    return tl.where(amax == 0.0, _EPSILON, scale)


@triton.jit
def decode_e8m0(code):
    """Return 2**(code - bias) as float32, a subnormal for code 0; `code` is int32 and not NaN."""
    return float_of(tl.where(code == 0, _ONE << (_MANTISSA - 1), code << _MANTISSA))
