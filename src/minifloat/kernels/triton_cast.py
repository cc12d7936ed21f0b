"""Rounding to formats of at most 8 bits inside Triton kernels: `numerics/cast.py` and `scale.py`, bit for bit.

Everything is integer arithmetic on the bits of float32, or one float32 operation that IEEE 754 defines. Hardware casts
are not used: they exist on some architectures only, and Triton's interpreter, which the tests run, gets them wrong. Two
things would change bits and are prevented: a product and a sum must not be contracted into a fused multiply-add (every
launch passes `OPTIONS`), and a division must be a division (`tl.div_rn`; the operator is an approximation).
Imports triton: see `triton_runtime`.
"""

from __future__ import annotations

import struct
from typing import Any

import triton
import triton.language as tl

from minifloat.numerics.formats import FLOAT32, ElementFormat

#: What every launch of a kernel that rounds passes.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}

# Globals of a kernel are constexpr, which mypy takes for what they hold.
_MANTISSA: Any = tl.constexpr(FLOAT32.mantissa_bits)
_ONE: Any = tl.constexpr(1)  # the interpreter cannot shift a plain number by a constexpr
_BIAS: Any = tl.constexpr(FLOAT32.bias)
_SIGN: Any = tl.constexpr(FLOAT32.bits - 1)
MAGNITUDE: Any = tl.constexpr((1 << (FLOAT32.bits - 1)) - 1)
INF_BITS: Any = tl.constexpr(FLOAT32.max_code + 1)
_MIN_NORMAL_BITS: Any = tl.constexpr(1 << FLOAT32.mantissa_bits)
_EPSILON: Any = tl.constexpr(2.0**-FLOAT32.mantissa_bits)


def constants(fmt: ElementFormat, prefix: str) -> dict[str, int]:
    """What the functions below have to know of a format, as arguments of a kernel.

    Args:
        fmt: A format of at most 8 bits.
        prefix: Of the names: ``{prefix}_MANTISSA``, ``{prefix}_BIAS``, ``{prefix}_MAX``.
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
    """The bits of a float32, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """The float32 of bits in int32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_magnitude(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):
    """`cast.encode` without its sign: nearest, ties to even, clamped; of NaN, the code of the largest value.

    Args:
        magnitude: Bits of float32 without their sign, int32.
        MANTISSA: Mantissa bits of the format.
        BIAS: Its bias.
        MAX: Bits of its largest value as float32.

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
    """The float32 value of a code without its sign, int32; the code is no NaN."""
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA)
    normal = float_of((code << (_MANTISSA - MANTISSA)) + ((_BIAS - BIAS) << _MANTISSA))
    return tl.where(code < (_ONE << MANTISSA), code.to(tl.float32) * SMALLEST, normal)


@triton.jit
def with_sign(magnitude, bits):
    """A float32 >= 0 with the sign that `bits` has."""
    return float_of(bits_of(magnitude) | (bits & ~MAGNITUDE))


@triton.jit
def sign_of(bits):
    """1 where the sign bit of a float32 is set, else 0."""
    return (bits >> _SIGN) & 1


@triton.jit
def float_scales(amax, LARGEST: tl.constexpr):
    """`scale.float_scales`: amax over the element's largest value; NaN and Inf stay what they are.

    Args:
        amax: float32 >= 0, or NaN.
        LARGEST: The largest value, a float.
    """
    bits = bits_of(tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))) & MAGNITUDE
    scale = float_of(tl.maximum(bits, _MIN_NORMAL_BITS))
    return tl.where(amax == 0.0, _EPSILON, scale)


@triton.jit
def decode_e8m0(code):
    """2**(code - bias) as float32, code 0 a subnormal; `code` int32, no NaN."""
    return float_of(tl.where(code == 0, _ONE << (_MANTISSA - 1), code << _MANTISSA))
