"""The Triton kernels: a product with weights decoded in registers, and decoding alone."""

from __future__ import annotations

import triton
import triton.language as tl

from minifloat.kernels.linear.triton.layout import GpuForm
from minifloat.kernels.triton_overlap import LINE_BYTES, prefetch, wait

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


@triton.jit
def parts_of(x, PARTS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, INTERP: tl.constexpr):
    """Split rows of x ``[BM, BK]`` into bfloat16 ``[BM * PARTS, BK]``: PARTS neighbouring rows add up to a row of x."""
    value = x.to(tl.float32)
    first = (value.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    rest = tl.where(first == value, 0.0, value - first)
    dtype: tl.constexpr = tl.float32 if INTERP else tl.bfloat16
    if PARTS == 2:
        rows = tl.join(first.to(dtype), rest.to(dtype)).permute(0, 2, 1)
    else:
        second = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        third = rest - second
        even = tl.join(first.to(dtype), third.to(dtype))
        odd = tl.join(second.to(dtype), tl.zeros_like(third).to(dtype))
        rows = tl.join(even, odd).reshape(BM, BK, PARTS).permute(0, 2, 1)
    return rows.reshape(BM * PARTS, BK)


@triton.jit(do_not_specialize=["M"])  # or each batch size would compile it again
def product_kernel(
    x_ptr, codes_ptr, factors_ptr, blocks_ptr, rows_ptr, bias_ptr, y_ptr, sums_ptr, counts_ptr,
    M, N, K, x_stride, y_stride, tiles, block_stride, block_rows,
    FORM: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, T: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr, UNITS: tl.constexpr, WORDS: tl.constexpr, BLOCK_TILES: tl.constexpr,
    RAGGED: tl.constexpr, BIAS: tl.constexpr, INTERP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute ``y[m, n] = sum over k of x[m, k] * w[n, k]``, times the factor of row n, plus the bias."""
    P: tl.constexpr = BN // 64
    HALVES: tl.constexpr = 1 if P == 1 else 2
    BK: tl.constexpr = 128 * T
    block_m, block_n, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    steps = tiles // T
    begin, end = part * steps // SPLIT, (part + 1) * steps // SPLIT
    rows_m = block_m * BM + tl.arange(0, BM)
    rows_n = block_n * BN + tl.arange(0, BN)
    cols = begin * BK + tl.arange(0, BK)
    # One or two panels of 128 rows, or half a panel. The second may be beyond a weight with an odd number of panels:
    # then the last panel is read again, and its results are not stored.
    if P <= 2:
        first = ((block_n * P // 2).to(tl.int64) * tiles + begin * T) * 2 + block_n * P % 2
    else:
        panels = tl.minimum(block_n * P // 2 + tl.arange(0, P // 2), (N - 1) // 128).to(tl.int64)
        first = ((panels * tiles + begin * T) * 2)[None, :, None]
    in_step = 2 * tl.arange(0, T)[:, None, None]
    if AHEAD > 0:
        LINE: tl.constexpr = LINE_BYTES // 2
        lines = codes_ptr + (
            first * UNITS + in_step * UNITS + LINE * tl.arange(0, UNITS * HALVES // LINE)[None, None, :]
        )
        for step in tl.static_range(AHEAD):
            prefetch(lines + tl.minimum(step, end - begin - 1) * (2 * T * UNITS))
    codes = codes_ptr + (first * UNITS + in_step * UNITS + tl.arange(0, UNITS * HALVES)[None, None, :])
    if WORDS > 0:
        factors = factors_ptr + (first * WORDS + in_step * WORDS + tl.arange(0, WORDS * HALVES)[None, None, :])
    x = x_ptr + rows_m.to(tl.int64)[:, None] * x_stride + cols[None, :]
    if FORM == FP8_BLOCK:
        blocks = blocks_ptr + tl.minimum(rows_n, N - 1) // block_rows * block_stride
        scale = tl.load(blocks + begin // BLOCK_TILES)
    in_m = (rows_m < M)[:, None]
    acc = tl.zeros((BN, BM * PARTS), tl.float32)
    wait(AHEAD > 0)
    for step in range(begin, end):
        pairs = tl.load(codes, eviction_policy="evict_first")
        words = pairs
        if WORDS > 0:
            words = tl.load(factors)
            factors += 2 * T * WORDS
        inputs = tl.load(
            x, mask=in_m & (cols < K)[None, :] if RAGGED else in_m, other=0.0, eviction_policy="evict_last"
        )
        w = decode(pairs, words, FORM, T, P, WIDE, INTERP)
        if PARTS > 1:
            inputs = parts_of(inputs, PARTS, BM, BK, INTERP)
        elif INTERP:
            inputs = inputs.to(tl.float32)
        if FORM == FP8_BLOCK:
            acc += tl.dot(w, inputs.T) * scale[:, None]
            scale = tl.load(blocks + tl.minimum(step + 1, tiles - 1) // BLOCK_TILES)
        else:
            acc = tl.dot(w, inputs.T, acc)
        codes += 2 * T * UNITS
        x += BK
        cols += BK
    if PARTS > 1:
        acc = tl.sum(acc.reshape(BN, BM, PARTS), axis=2)
    last = True
    if SPLIT > 1:
        tile = block_n * tl.num_programs(0) + block_m
        within = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        sums = sums_ptr + tile.to(tl.int64) * (SPLIT * BN * BM) + within
        tl.store(sums + part * (BN * BM), acc, cache_modifier=".cg")
        tl.debug_barrier()
        last = tl.atomic_add(counts_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if last:
            acc = tl.zeros((BN, BM), tl.float32)  # sums in their order: the bits do not depend on who is last
            for other in range(SPLIT):
                acc += tl.load(sums + other * (BN * BM), cache_modifier=".cg")
            tl.store(counts_ptr + tile, 0)
    if last:
        in_n = rows_n < N
        acc *= tl.load(rows_ptr + rows_n, mask=in_n, other=0.0)[:, None]
        if BIAS:
            acc += tl.load(bias_ptr + rows_n, mask=in_n, other=0.0).to(tl.float32)[:, None]
        y = y_ptr + rows_m.to(tl.int64)[None, :] * y_stride + rows_n[:, None]
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=in_n[:, None] & (rows_m < M)[None, :])


@triton.jit
def dequantize_kernel(
    codes_ptr, factors_ptr, blocks_ptr, rows_ptr, y_ptr, first_row, N, K, tiles, block_stride, block_rows,
    FORM: tl.constexpr, WIDE: tl.constexpr, UNITS: tl.constexpr, WORDS: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """Decode rows of a weight ``[N, K]`` from `first_row`, a multiple of 64, into contiguous `y_ptr`, rounded once."""
    half, tile = first_row // 64 + tl.program_id(1), tl.program_id(0)
    where = ((half // 2).to(tl.int64) * tiles + tile) * 2 + half % 2
    pairs = tl.load(codes_ptr + where * UNITS + tl.arange(0, UNITS)[None, None, :])
    words = pairs
    if WORDS > 0:
        words = tl.load(factors_ptr + where * WORDS + tl.arange(0, WORDS)[None, None, :])
    rows, cols = half * 64 + tl.arange(0, 64), tile * 128 + tl.arange(0, 128)
    in_n = rows < N
    scale = tl.load(rows_ptr + rows, mask=in_n, other=0.0)
    if FORM == FP8_BLOCK:
        scale *= tl.load(blocks_ptr + rows // block_rows * block_stride + tile // BLOCK_TILES, mask=in_n, other=0.0)
    w = decode(pairs, words, FORM, 1, 1, WIDE, True).to(tl.float32) * scale[:, None]
    y = y_ptr + (rows - first_row).to(tl.int64)[:, None] * K + cols[None, :]
    tl.store(y, w.to(y_ptr.dtype.element_ty), mask=in_n[:, None] & (cols < K)[None, :])
