"""Decodes in registers: 32-bit words of E4M3 or E2M1 into pairs of bfloat16, times a pair of multipliers."""

from __future__ import annotations

import triton
import triton.language as tl

from minifloat.kernels.linear.triton.layout import GpuForm

# Masks turn every element into a bfloat16 that is too small by a power of two; the multiplier corrects this and applies
# the scale. Both are exact: significands have at most 6 bits. PLAIN does the same without PTX, for the interpreter.

#: ``x * m + -0`` is ``x * m``, on sm_80 too, which has no product of two pairs alone.
MINUS_ZERO = tl.constexpr(0x80008000 - (1 << 32))

#: Operands: $2 the word, $3 and $4 the pair of multipliers twice, $5 and $6 MINUS_ZERO twice.
FP8_PTX = tl.constexpr("""{
.reg .b32 high, low;
and.b32 $0, $2, 0x87F087F0;
fma.rn.bf16x2 $0, $0, $3, $5;
shf.r.wrap.b32 high, $2, $2, 4;
and.b32 high, high, 0x87808780;
shl.b32 low, $2, 4;
and.b32 low, low, 0x00700070;
or.b32 high, high, low;
fma.rn.bf16x2 $1, high, $3, $5;
}""")
#: Operands: $4 the word; $5 and $6 the multipliers of the first 16 columns, $7 and $8 those of the second 16; $9 and
#: $10 MINUS_ZERO.
FP4_PTX = tl.constexpr("""{
.reg .b32 a, b, c, d, e;
shl.b32 a, $4, 6;
and.b32 a, a, 0x81C081C0;
fma.rn.bf16x2 $0, a, $5, $9;
shl.b32 b, $4, 2;
and.b32 b, b, 0x81C081C0;
fma.rn.bf16x2 $1, b, $5, $9;
shf.r.wrap.b32 c, $4, $4, 4;
and.b32 c, c, 0x81C081C0;
fma.rn.bf16x2 $2, c, $7, $9;
shr.u32 d, $4, 8;
and.b32 d, d, 0x00400040;
and.b32 e, $4, 0x81808180;
or.b32 d, d, e;
fma.rn.bf16x2 $3, d, $7, $9;
}""")

FP8_BLOCK = tl.constexpr(int(GpuForm.FP8_BLOCK))
MXFP8 = tl.constexpr(int(GpuForm.MXFP8))
NVFP4 = tl.constexpr(int(GpuForm.NVFP4))
#: a pair of the bfloat16 2**120, which turns the bits of E4M3 into its value.
E4M3_MULTIPLIER = tl.constexpr(0x7B807B80)


@triton.jit
def decode(pairs, words, FORM: tl.constexpr, T: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr, PLAIN: tl.constexpr):
    """Decode the elements of a tile and multiply them with their coded scales."""
    if FORM <= MXFP8:
        units = pairs.reshape(T, P, 4, 4, 8, 4, 2, 2, 2)  # T P b w g t s h e
        if FORM == MXFP8:
            fields = tl.join(
                tl.join(words & 255, (words >> 8) & 255), tl.join((words >> 16) & 255, (words >> 24) & 255)
            )
            fields = fields.reshape(T, P, 4, 8, 2, 2, 2).permute(0, 1, 6, 5, 2, 3, 4)
            factors = fields.reshape(T, P, 4, 4, 8, 1, 1, 2, 1) * 0x00800080
        else:
            factors = tl.full([1, 1, 1, 1, 1, 1, 1, 1, 1], E4M3_MULTIPLIER, tl.int32)
        if PLAIN:
            word, factor = _word(units), _broadcast(factors, units)
            first = _values(word & 0x87F087F0, factor)
            second = _values(_rotated(word) & 0x87808780 | (word << 4) & 0x00700070, factor)
        else:
            zero = tl.full([1, 1, 1, 1, 1, 1, 1, 1, 1], MINUS_ZERO, tl.int32)
            first, second = tl.inline_asm_elementwise(
                FP8_PTX,
                "=r,=r,r,r,r,r,r",
                [units, factors, zero],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        values = tl.join(first, second)  # T P b w g t s h e j
        if WIDE:
            values = values.permute(1, 3, 7, 4, 0, 2, 6, 5, 9, 8)  # P w h g, T b s t j e
        else:
            values = values.permute(1, 3, 7, 4, 0, 2, 6, 9, 5, 8)  # P w h g, T b s j t e
    else:
        units = pairs.reshape(T, P, 2, 4, 8, 4, 2, 2, 2)  # T P q w g t b h e
        if FORM == NVFP4:
            codes = words.reshape(T, P, 2, 4, 8, 2)  # T P q w g h; bytes: b, then s
            first = tl.join(codes & 255, (codes >> 16) & 255).permute(0, 1, 2, 3, 4, 6, 5)
            second = tl.join((codes >> 8) & 255, (codes >> 24) & 255).permute(0, 1, 2, 3, 4, 6, 5)
            early = first.reshape(T, P, 2, 4, 8, 1, 2, 2, 1) * 0x00100010 + 0x75807580
            late = second.reshape(T, P, 2, 4, 8, 1, 2, 2, 1) * 0x00100010 + 0x75807580
        else:
            fields = tl.join(
                tl.join(words & 255, (words >> 8) & 255), tl.join((words >> 16) & 255, (words >> 24) & 255)
            )
            fields = fields.reshape(T, P, 4, 8, 2, 2, 2).permute(0, 1, 6, 2, 3, 5, 4)
            early = fields.reshape(T, P, 2, 4, 8, 1, 2, 2, 1) * 0x00800080
            late = early
        if PLAIN:
            word = _word(units)
            a = _values((word << 6) & 0x81C081C0, _broadcast(early, units))
            b = _values((word << 2) & 0x81C081C0, _broadcast(early, units))
            c = _values(_rotated(word) & 0x81C081C0, _broadcast(late, units))
            d = _values((word >> 8) & 0x00400040 | word & 0x81808180, _broadcast(late, units))
        else:
            zero = tl.full([1, 1, 1, 1, 1, 1, 1, 1, 1], MINUS_ZERO, tl.int32)
            a, b, c, d = tl.inline_asm_elementwise(
                FP4_PTX,
                "=r,=r,=r,=r,r,r,r,r,r,r,r",
                [units, early, late, zero],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        values = tl.join(tl.join(a, b), tl.join(c, d))  # T P q w g t b h e j s
        if WIDE:
            values = values.permute(1, 3, 7, 4, 0, 2, 6, 10, 5, 9, 8)  # P w h g, T q b s t j e
        else:
            values = values.permute(1, 3, 7, 4, 0, 2, 6, 10, 9, 5, 8)  # P w h g, T q b s j t e
    return values.reshape(64 * P, 128 * T)


@triton.jit
def _word(units):
    """Interpreter only: join both halves into uint32 words, without the last axis."""
    low, high = tl.split(units.to(tl.int32) & 0xFFFF)
    return (low | (high << 16)).to(tl.uint32, bitcast=True)


@triton.jit
def _broadcast(factors, units):
    """Interpreter only: broadcast the multipliers to every word."""
    first, _ = tl.split(tl.broadcast_to(factors, units.shape))
    return first


@triton.jit
def _rotated(word):
    """Interpreter only: rotate words right by 4 bits."""
    return (word >> 4) | (word << 28)


@triton.jit
def _values(word, factor):
    """Interpreter only: multiply both halves, as bfloat16, with the multiplier; float32 along a last axis."""
    multiplier = (factor << 16).to(tl.float32, bitcast=True)
    low = (word << 16).to(tl.float32, bitcast=True) * multiplier
    high = (word & 0xFFFF0000).to(tl.float32, bitcast=True) * multiplier
    return tl.join(low, high)
