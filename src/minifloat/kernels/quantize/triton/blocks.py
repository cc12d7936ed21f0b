"""The Triton kernels of the quantizer: blocks of a slab to codes, scales and error statistics; and amax.

A program handles whole blocks: many small ones (groups of 16 or 32), or one block in chunks (128x128, a row), which it
reads twice, the second time from the cache. For any block shape, it holds a matrix ``[BLOCKS, CHUNK]``. The operations
that determine bits are those of `triton_cast`, `numerics/scale_rules.py` and `numerics/scale_search.py`, in the same
order. Sums of squares are float64, one pair per program, so that the order of programs does not change them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from minifloat.kernels.triton_cast import (
    INF_BITS,
    MAGNITUDE,
    bits_of,
    decode_e8m0,
    decode_magnitude,
    encode_magnitude,
    float_of,
    float_scales,
    load_bits,
    sign_of,
    with_sign,
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

_MANTISSA: Any = tl.constexpr(FLOAT32.mantissa_bits)
_ONE: Any = tl.constexpr(1)  # the interpreter cannot shift a plain number by a constexpr
_LAST_MANTISSA: Any = tl.constexpr((1 << FLOAT32.mantissa_bits) - 1)
_LARGEST_E8M0: Any = tl.constexpr(E8M0.max_code)
_E8M0_BIAS: Any = tl.constexpr(E8M0.bias)


@triton.jit
def _sum_halves(x, BLOCKS: tl.constexpr, LEVELS: tl.constexpr):
    """Sum ``[BLOCKS, 2**LEVELS]`` by the tree of `scale_search._block_error`: the upper half is added to the lower."""
    for level in tl.static_range(LEVELS):
        halves = tl.reshape(x, [BLOCKS, 2, _ONE << (LEVELS - 1 - level)])
        low, high = tl.split(tl.permute(halves, (0, 2, 1)))
        x = low + high
    return tl.reshape(x, [BLOCKS])


@triton.jit
def _round(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):
    """Round each float32 to the value of the nearest element."""
    bits = bits_of(y)
    return with_sign(decode_magnitude(encode_magnitude(bits & MAGNITUDE, MANTISSA, BIAS, MAX), MANTISSA, BIAS), bits)


@triton.jit
def _block_error(
    y,
    STEP: tl.constexpr,
    BLOCKS: tl.constexpr,
    LEVELS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    MAX: tl.constexpr,
):
    """Compute `scale_search._block_error`; dividing by a power of two is multiplying by its inverse."""
    INVERSE: tl.constexpr = 1.0 / STEP
    d = y - _round(y * INVERSE, MANTISSA, BIAS, MAX) * STEP
    return _sum_halves(d * d, BLOCKS, LEVELS)


@triton.jit
def _search(
    w,
    amax,
    EMAX: tl.constexpr,
    BLOCKS: tl.constexpr,
    LEVELS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    MAX: tl.constexpr,
):
    """Compute `scale_search.search_e8m0_scales` with the offsets in the order of `SEARCH_OFFSETS`: 0, 1, -1."""
    floor = tl.maximum((bits_of(amax) >> _MANTISSA) - EMAX, 0)
    y = w * decode_e8m0(-(floor - 2 * _E8M0_BIAS))[:, None]  # in the interpreter a constexpr cannot stand first
    error = _block_error(y, 1.0, BLOCKS, LEVELS, MANTISSA, BIAS, MAX)
    above = _block_error(y, 2.0, BLOCKS, LEVELS, MANTISSA, BIAS, MAX)
    below = _block_error(y, 0.5, BLOCKS, LEVELS, MANTISSA, BIAS, MAX)
    code = tl.where(above < error, floor + 1, floor)
    return tl.where((below < tl.minimum(above, error)) & (floor > 0), floor - 1, code)


@triton.jit
def _try_code(
    x,
    first,
    best_code,
    best_error,
    OFFSET: tl.constexpr,
    BLOCKS: tl.constexpr,
    LEVELS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    MAX: tl.constexpr,
    SCALE_MANTISSA: tl.constexpr,
    SCALE_BIAS: tl.constexpr,
    LAST_CODE: tl.constexpr,
):
    """Return the better of the best code so far and ``first + OFFSET``, and its error."""
    code = tl.minimum(tl.maximum(first + OFFSET, 1), LAST_CODE)
    value = decode_magnitude(code, SCALE_MANTISSA, SCALE_BIAS)
    inverse = tl.div_rn(tl.full(value.shape, 1.0, tl.float32), value)
    error = _block_error(x * inverse[:, None], 1.0, BLOCKS, LEVELS, MANTISSA, BIAS, MAX) * (value * value)
    better = error < best_error
    return tl.where(better, code, best_code), tl.where(better, error, best_error)


@triton.jit
def _search_codes(
    x,
    first,
    BLOCKS: tl.constexpr,
    LEVELS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    MAX: tl.constexpr,
    SCALE_MANTISSA: tl.constexpr,
    SCALE_BIAS: tl.constexpr,
    LAST_CODE: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """Compute `scale_search.search_nvfp4_scales`."""
    code, error = first, tl.full(first.shape, float("inf"), tl.float32)
    for index in tl.static_range(len(OFFSETS)):
        code, error = _try_code(
            x,
            first,
            code,
            error,
            OFFSETS[index],
            BLOCKS,
            LEVELS,
            MANTISSA,
            BIAS,
            MAX,
            SCALE_MANTISSA,
            SCALE_BIAS,
            LAST_CODE,
        )
    return code


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
def quantize_blocks(
    w_ptr,
    codes_ptr,
    scales_ptr,
    sums_ptr,
    counts_ptr,
    rows,
    cols,
    grid_cols,
    blocks,
    given_amax,
    divisor,
    BF16: tl.constexpr,
    PACKED: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    SCALING: tl.constexpr,
    ZERO_SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    LARGEST: tl.constexpr,
    LIMIT: tl.constexpr,
    EMAX: tl.constexpr,
    ELEMENT_MANTISSA: tl.constexpr,
    ELEMENT_BIAS: tl.constexpr,
    ELEMENT_MAX: tl.constexpr,
    ELEMENT_SIGN: tl.constexpr,
    SCALE_MANTISSA: tl.constexpr,
    SCALE_BIAS: tl.constexpr,
    SCALE_MAX: tl.constexpr,
    LAST_SCALE: tl.constexpr,
    SCALE_OFFSETS: tl.constexpr,
):
    """Quantize ``BLOCKS`` blocks of a slab.

    Args:
        w_ptr: ``[rows, cols]``, contiguous; int16 where BF16, else float16 or float32.
        codes_ptr: uint8 ``[rows, cols]``, or half of the columns where PACKED.
        scales_ptr: The grid, float32 or uint8; with ONE_SCALE a single scale.
        sums_ptr: float64 ``[programs, 2]``: signal and noise.
        counts_ptr: int32 ``[programs, 3]``: numbers of saturated, flushed and non-finite elements.
        rows: Rows of the slab.
        cols: Columns of the slab; even with PACKED.
        grid_cols: Blocks per row of the grid.
        blocks: Number of blocks.
        given_amax: float32: with ONE_SCALE used as the amax of every block.
        divisor: float32: the global divisor of NVFP4.
        BF16: Whether the slab is bfloat16.
        PACKED: Whether two codes share a byte.
        ONE_SCALE: Whether all blocks share one scale; blocks are then rows.
        SCALING: How scales are computed.
        ZERO_SCALE: CODED_SCALES: the code of the scale of a block of zeros.
        BLOCK_ROWS: Rows of a block.
        BLOCK_COLS: Columns of a block, a power of two; 0 for all columns.
        BLOCKS: Blocks per program.
        CHUNK: Elements of a block that are loaded together; the whole block for SEARCH and CODED_SEARCH.
        LEVELS: log2 of CHUNK.
        LARGEST: The largest value of the element format, a float.
        LIMIT: Magnitudes above this limit count as saturated.
        EMAX: The exponent of the largest value of the element format.
        ELEMENT_MANTISSA: `triton_cast.constants` of the element format.
        ELEMENT_BIAS: `triton_cast.constants` of the element format.
        ELEMENT_MAX: `triton_cast.constants` of the element format.
        ELEMENT_SIGN: Bit number of the sign of a code.
        SCALE_MANTISSA: `triton_cast.constants` of the format of coded scales.
        SCALE_BIAS: `triton_cast.constants` of the format of coded scales.
        SCALE_MAX: `triton_cast.constants` of the format of coded scales.
        LAST_SCALE: The code of the largest finite coded scale.
        SCALE_OFFSETS: CODED_SEARCH: the codes to try, relative to that of amax, in order (`NVFP4_SEARCH_OFFSETS`).
    """
    index = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    element = tl.arange(0, CHUNK)
    if BLOCK_COLS == 0:  # one row, of any width
        first_row, first_col, chunks = index, index * 0, tl.cdiv(cols, CHUNK)
        inner_row, inner_col = element * 0, element
    else:
        first_row, first_col = index // grid_cols * BLOCK_ROWS, index % grid_cols * BLOCK_COLS
        chunks = BLOCK_ROWS * BLOCK_COLS // CHUNK
        inner_row, inner_col = element // BLOCK_COLS, element % BLOCK_COLS
    row = first_row[:, None] + inner_row[None, :]
    col = first_col[:, None] + inner_col[None, :]
    inside = (index < blocks)[:, None] & (row < rows)
    # Distance to the next chunk: columns of a row, or rows of a block.
    row_step: tl.constexpr = 0 if BLOCK_COLS == 0 else CHUNK // BLOCK_COLS
    col_step: tl.constexpr = CHUNK if BLOCK_COLS == 0 else 0

    amax_bits = tl.zeros([BLOCKS], tl.int32)
    invalid = tl.zeros([BLOCKS], tl.int32)
    for step in range(chunks):
        at_row, at_col = row + step * row_step, col + step * col_step
        mask = inside & (at_row < rows) & (at_col < cols)
        magnitude = load_bits(w_ptr, at_row * cols + at_col, mask, BF16) & MAGNITUDE
        invalid += tl.sum((magnitude >= INF_BITS).to(tl.int32), 1)
        amax_bits = tl.maximum(amax_bits, tl.max(tl.where(magnitude < INF_BITS, magnitude, 0), 1))
    amax = float_of(amax_bits)
    if ONE_SCALE:
        amax = tl.zeros([BLOCKS], tl.float32) + given_amax

    if SCALING == FLOAT_SCALES:
        scale = float_scales(amax, LARGEST)
        stored = scale
    elif SCALING == CODED_SCALES or SCALING == CODED_SEARCH:  # noqa: SIM109 (Triton has no `in`)
        unrounded = divisor * tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
        rounded = encode_magnitude(bits_of(unrounded) & MAGNITUDE, SCALE_MANTISSA, SCALE_BIAS, SCALE_MAX)
        stored = tl.where(amax == 0.0, ZERO_SCALE, tl.maximum(rounded, 1))
        if SCALING == CODED_SEARCH:
            bits = load_bits(w_ptr, row * cols + col, inside & (col < cols), BF16)
            x = float_of(tl.where((bits & MAGNITUDE) < INF_BITS, bits, 0)) * divisor
            stored = _search_codes(
                x,
                stored,
                BLOCKS,
                LEVELS,
                ELEMENT_MANTISSA,
                ELEMENT_BIAS,
                ELEMENT_MAX,
                SCALE_MANTISSA,
                SCALE_BIAS,
                LAST_SCALE,
                SCALE_OFFSETS,
            )
        scale = tl.div_rn(
            decode_magnitude(stored, SCALE_MANTISSA, SCALE_BIAS), tl.zeros([BLOCKS], tl.float32) + divisor
        )
    elif SCALING == SEARCH:
        bits = load_bits(w_ptr, row * cols + col, inside & (col < cols), BF16)
        w = float_of(tl.where((bits & MAGNITUDE) < INF_BITS, bits, 0))
        stored = _search(w, amax, EMAX, BLOCKS, LEVELS, ELEMENT_MANTISSA, ELEMENT_BIAS, ELEMENT_MAX)
        scale = decode_e8m0(stored)
    else:
        stored = _e8m0(amax, SCALING, LARGEST, EMAX, ELEMENT_MANTISSA)
        scale = decode_e8m0(stored)
    if ONE_SCALE:
        tl.store(scales_ptr + index * 0, stored.to(scales_ptr.dtype.element_ty), index == 0)
    else:
        tl.store(scales_ptr + index, stored.to(scales_ptr.dtype.element_ty), index < blocks)

    signal = tl.zeros([BLOCKS], tl.float64)
    noise = tl.zeros([BLOCKS], tl.float64)
    saturated = tl.zeros([BLOCKS], tl.int32)
    flushed = tl.zeros([BLOCKS], tl.int32)
    full = tl.broadcast_to(scale[:, None], [BLOCKS, CHUNK])
    for step in range(chunks):
        at_row, at_col = row + step * row_step, col + step * col_step
        mask = inside & (at_row < rows) & (at_col < cols)
        bits = load_bits(w_ptr, at_row * cols + at_col, mask, BF16)
        bits = tl.where((bits & MAGNITUDE) < INF_BITS, bits, 0)
        w = float_of(bits)
        quotient = bits_of(tl.div_rn(w, full)) & MAGNITUDE
        code = encode_magnitude(quotient, ELEMENT_MANTISSA, ELEMENT_BIAS, ELEMENT_MAX)
        value = with_sign(decode_magnitude(code, ELEMENT_MANTISSA, ELEMENT_BIAS), bits)
        error = w.to(tl.float64) - (value * full).to(tl.float64)
        signal += tl.sum(w.to(tl.float64) * w.to(tl.float64), 1)
        noise += tl.sum(error * error, 1)
        saturated += tl.sum((float_of(quotient) > LIMIT).to(tl.int32), 1)
        flushed += tl.sum(((w != 0.0) & (code == 0)).to(tl.int32), 1)
        code |= sign_of(bits) << ELEMENT_SIGN
        if PACKED:
            even, odd = tl.split(tl.reshape(code, [BLOCKS, CHUNK // 2, 2]))
            to = tl.reshape(at_row * (cols // 2) + at_col // 2, [BLOCKS, CHUNK // 2, 2])
            to, _ = tl.split(to)
            inside_even, _ = tl.split(tl.reshape(mask.to(tl.int32), [BLOCKS, CHUNK // 2, 2]))
            tl.store(codes_ptr + to, (even | (odd << 4)).to(tl.uint8), inside_even != 0)
        else:
            tl.store(codes_ptr + at_row * cols + at_col, code.to(tl.uint8), mask)
    program = tl.program_id(0)
    tl.store(sums_ptr + program * 2, tl.sum(signal, 0))
    tl.store(sums_ptr + program * 2 + 1, tl.sum(noise, 0))
    tl.store(counts_ptr + program * 3, tl.sum(saturated, 0))
    tl.store(counts_ptr + program * 3 + 1, tl.sum(flushed, 0))
    tl.store(counts_ptr + program * 3 + 2, tl.sum(invalid, 0))


@triton.jit
def amax_of_chunks(w_ptr, amax_ptr, counts_ptr, count, BF16: tl.constexpr, CHUNK: tl.constexpr):
    """Write the bits of the largest finite magnitude of each chunk of ``[count]`` elements, and its NaN and Inf."""
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    magnitude = load_bits(w_ptr, offsets, offsets < count, BF16) & MAGNITUDE
    tl.store(amax_ptr + program, tl.max(tl.where(magnitude < INF_BITS, magnitude, 0), 0))
    tl.store(counts_ptr + program, tl.sum((magnitude >= INF_BITS).to(tl.int32), 0))
