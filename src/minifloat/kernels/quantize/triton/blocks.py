"""The Triton kernels of the quantizer: blocks of a slab to codes, scales and error statistics; and amax."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from minifloat.kernels.quantize.triton.scales import block_scales
from minifloat.kernels.triton_cast import (
    INF_BITS,
    LARGEST_QUOTIENT,
    MAGNITUDE,
    code_of,
    divide,
    division_terms,
    float_of,
    inverse_of_power,
    load_bits,
    round_magnitude,
    with_sign,
)
from minifloat.numerics.formats import FLOAT32

# A tile has the dimensions ``[BLOCKS, PARTS, VECTOR]``, or ``[PARTS, BLOCKS, VECTOR]`` where scales are searched for: a
# vector is 16 bytes of a row, and Triton gives vectors to threads in the order of the dimensions, so that neighbouring
# threads hold neighbouring vectors, or each thread a whole block. A row that does not fit in registers is read twice.

_SIGN: Any = tl.constexpr(FLOAT32.bits - 1)
_ONE: Any = tl.constexpr(1)  # the interpreter cannot shift a plain number by a constexpr
#: a tile has fewer elements than a count has values.
_COUNT_BITS: Any = tl.constexpr(16)
_COUNT: Any = tl.constexpr((1 << 16) - 1)
#: Columns of the statistics of a program.
STATISTICS = ("signal", "noise", "saturated", "flushed", "nonfinite")
_STATISTICS: Any = tl.constexpr(len(STATISTICS))


@triton.jit
def _spread(x, PART_AXIS: tl.constexpr):
    """Give a value per block the dimensions of a tile."""
    return tl.expand_dims(tl.expand_dims(x, PART_AXIS), 2)


@triton.jit
def _mask(exists, row, rows, col, cols, RAGGED: tl.constexpr):
    """Return which elements of a tile exist; a mask that is the same for all of a vector allows wide loads."""
    mask = tl.broadcast_to(exists & (row < rows), col.shape)
    if RAGGED:
        mask &= col < cols
    return mask


@triton.jit
def _finite(bits):
    return tl.where((bits & MAGNITUDE) < INF_BITS, bits, 0)


@triton.jit
def _store_codes(
    codes_ptr, code, start, inner, length, mask, PACKED: tl.constexpr, PART_AXIS: tl.constexpr, RAGGED: tl.constexpr
):
    """Store the codes of a tile; the arguments are those of `_cast`."""
    VECTOR: tl.constexpr = code.shape[2]
    if PACKED:
        PAIRS: tl.constexpr = VECTOR // 2
        even, odd = tl.split(tl.reshape(code, [code.shape[0], code.shape[1], PAIRS, 2]))
        byte = (even | (odd << 4)).to(tl.uint8)
        if PART_AXIS == 0:  # a thread holds a block: it stores all of it at once
            BYTES: tl.constexpr = code.shape[0] * PAIRS
            byte = tl.reshape(tl.permute(byte, (1, 0, 2)), [code.shape[1], BYTES])
            to = (start // 2)[:, None] + tl.arange(0, BYTES)
            inside = tl.broadcast_to((length > 0)[:, None], byte.shape)
            if RAGGED:
                inside &= tl.arange(0, BYTES)[None, :] < (length // 2)[:, None]
        else:
            to = _spread(start // 2, PART_AXIS) + (_spread(inner // 2, 1 - PART_AXIS) + tl.arange(0, PAIRS))
            both, _ = tl.split(tl.reshape(mask.to(tl.int32), [code.shape[0], code.shape[1], PAIRS, 2]))
            inside = both != 0
        tl.store(codes_ptr + to, byte, inside)
    else:
        to = _spread(start, PART_AXIS) + (_spread(inner, 1 - PART_AXIS) + tl.arange(0, VECTOR))
        tl.store(codes_ptr + to, code.to(tl.uint8), mask)


@triton.jit
def _cast(
    bits,
    factor,
    codes_ptr,
    start,
    inner,
    length,
    mask,
    PACKED: tl.constexpr,
    PART_AXIS: tl.constexpr,
    RAGGED: tl.constexpr,
    HARDWARE: tl.constexpr,
    POWERS: tl.constexpr,
    SATURATES: tl.constexpr,
    LARGEST: tl.constexpr,
    LIMIT: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SIGN: tl.constexpr,
):
    w = float_of(bits & MAGNITUDE)
    if POWERS:
        quotient = w * _spread(inverse_of_power(factor), PART_AXIS)
    else:
        power, divisor, inverse = division_terms(factor)
        dividend = w * _spread(power, PART_AXIS)
        if SATURATES:
            dividend = tl.minimum(dividend, _spread(divisor * LARGEST_QUOTIENT, PART_AXIS))
        quotient = divide(dividend, _spread(divisor, PART_AXIS), _spread(inverse, PART_AXIS))
    value = round_magnitude(quotient, MANTISSA, BIAS, LARGEST, 1.0, SATURATES)
    if HARDWARE:
        # Codes of the hardware are only stored: ptxas of CUDA 12.8 decodes them from registers that it never wrote.
        code = with_sign(value, bits).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = code_of(value, MANTISSA, BIAS) | ((bits >> (_SIGN - SIGN)) & (_ONE << SIGN))
    exact = w.to(tl.float64)
    error = exact - (value * _spread(factor, PART_AXIS)).to(tl.float64)
    counts = ((w != 0.0) & (value == 0.0)).to(tl.int32)
    if SATURATES:
        counts += (quotient > LIMIT).to(tl.int32) << _COUNT_BITS
    _store_codes(codes_ptr, code, start, inner, length, mask, PACKED, PART_AXIS, RAGGED)
    return tl.sum(exact * exact, 2), tl.sum(error * error, 2), tl.sum(counts, 2)


@triton.jit
def quantize_blocks(
    w_ptr,
    codes_ptr,
    scales_ptr,
    statistics_ptr,
    rows,
    cols,
    grid_cols,
    blocks,
    tiles,
    given_amax,
    divisor,
    BF16: tl.constexpr,
    PACKED: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    SCALING: tl.constexpr,
    SATURATES: tl.constexpr,
    POWERS: tl.constexpr,
    HARDWARE: tl.constexpr,
    ZERO_SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    PART_AXIS: tl.constexpr,
    WHOLE: tl.constexpr,
    RAGGED: tl.constexpr,
    LARGEST: tl.constexpr,
    LIMIT: tl.constexpr,
    EMAX: tl.constexpr,
    ELEMENT_MANTISSA: tl.constexpr,
    ELEMENT_BIAS: tl.constexpr,
    ELEMENT_SIGN: tl.constexpr,
    SCALE_MANTISSA: tl.constexpr,
    SCALE_BIAS: tl.constexpr,
    SCALE_MAX: tl.constexpr,
    LAST_SCALE: tl.constexpr,
    SCALE_OFFSETS: tl.constexpr,
):
    """Quantize `tiles` times ``BLOCKS`` blocks of a slab."""
    part = tl.arange(0, PARTS)
    if BLOCK_COLS == 0:  # one row, of any width
        inner_row, inner_col = part * 0, part * VECTOR
        chunks = 1 if WHOLE else tl.cdiv(cols, PARTS * VECTOR)
    else:
        inner_row, inner_col = part // (BLOCK_COLS // VECTOR), part % (BLOCK_COLS // VECTOR) * VECTOR
        chunks = BLOCK_ROWS * BLOCK_COLS // (PARTS * VECTOR)
    # Distance to the next chunk: columns of a row, or rows of a block.
    row_step: tl.constexpr = 0 if BLOCK_COLS == 0 else PARTS * VECTOR // BLOCK_COLS
    col_step: tl.constexpr = PARTS * VECTOR if BLOCK_COLS == 0 else 0
    distance = tl.cast(row_step, tl.int64) * cols + col_step
    inner = inner_row * cols + inner_col
    FIRST: tl.constexpr = BLOCKS if PART_AXIS == 1 else PARTS
    SECOND: tl.constexpr = PARTS if PART_AXIS == 1 else BLOCKS
    signal = tl.zeros([FIRST, SECOND], tl.float64)
    noise = tl.zeros([FIRST, SECOND], tl.float64)
    saturated = tl.zeros([FIRST, SECOND], tl.int32)
    flushed = tl.zeros([FIRST, SECOND], tl.int32)
    nonfinite = tl.zeros([BLOCKS], tl.int32)
    for tile in range(tiles):
        index = (tl.program_id(0) * tiles + tile) * BLOCKS + tl.arange(0, BLOCKS)
        if BLOCK_COLS == 0:
            first_row, first_col = index, index * 0
        else:
            first_row, first_col = index // grid_cols * BLOCK_ROWS, index % grid_cols * BLOCK_COLS
        start = first_row.to(tl.int64) * cols + first_col
        row = _spread(first_row, PART_AXIS) + _spread(inner_row, 1 - PART_AXIS)
        col = _spread(first_col, PART_AXIS) + (_spread(inner_col, 1 - PART_AXIS) + tl.arange(0, VECTOR))
        exists = _spread(index < blocks, PART_AXIS)
        mask = _mask(exists, row, rows, col, cols, RAGGED)
        length = tl.where(index < blocks, cols - first_col, 0)
        offsets = _spread(start, PART_AXIS) + (_spread(inner, 1 - PART_AXIS) + tl.arange(0, VECTOR))

        bits = load_bits(w_ptr, offsets, mask, BF16)
        of_vectors = tl.max(bits & MAGNITUDE, 2)
        if not WHOLE:
            for step in range(1, chunks):
                inside = _mask(exists, row + step * row_step, rows, col + step * col_step, cols, RAGGED)
                more = load_bits(w_ptr, offsets + step * distance, inside, BF16)
                of_vectors = tl.maximum(of_vectors, tl.max(more & MAGNITUDE, 2))
        largest = tl.max(of_vectors, PART_AXIS)
        # As integers, the bits of NaN and Inf are larger than those of all numbers.
        dirty = tl.max(largest, 0) >= INF_BITS
        if dirty:
            invalid = (bits & MAGNITUDE) >= INF_BITS
            bits = _finite(bits)
            nonfinite += tl.sum(tl.sum(invalid.to(tl.int32), 2), PART_AXIS)
            largest = tl.max(tl.max(bits & MAGNITUDE, 2), PART_AXIS)
            if not WHOLE:
                for step in range(1, chunks):
                    inside = _mask(exists, row + step * row_step, rows, col + step * col_step, cols, RAGGED)
                    more = load_bits(w_ptr, offsets + step * distance, inside, BF16)
                    invalid = (more & MAGNITUDE) >= INF_BITS
                    nonfinite += tl.sum(tl.sum(invalid.to(tl.int32), 2), PART_AXIS)
                    largest = tl.maximum(largest, tl.max(tl.max(_finite(more) & MAGNITUDE, 2), PART_AXIS))
        amax = float_of(largest)
        if ONE_SCALE:
            amax = tl.zeros([BLOCKS], tl.float32) + given_amax

        stored, factor = block_scales(
            float_of(bits & MAGNITUDE),
            amax,
            divisor,
            SCALING,
            ZERO_SCALE,
            BLOCKS,
            PARTS,
            VECTOR,
            LARGEST,
            EMAX,
            ELEMENT_MANTISSA,
            ELEMENT_BIAS,
            SCALE_MANTISSA,
            SCALE_BIAS,
            SCALE_MAX,
            LAST_SCALE,
            SCALE_OFFSETS,
        )
        stored = stored.to(scales_ptr.dtype.element_ty)
        if ONE_SCALE:
            tl.store(scales_ptr + index * 0, stored, index == 0)
        else:
            tl.store(scales_ptr + index, stored, index < blocks)

        for step in range(chunks):
            if not WHOLE:
                mask = _mask(exists, row + step * row_step, rows, col + step * col_step, cols, RAGGED)
                bits = load_bits(w_ptr, offsets + step * distance, mask, BF16)
                if dirty:
                    bits = _finite(bits)
            squares, errors, counts = _cast(
                bits,
                factor,
                codes_ptr,
                start + step * distance,
                inner,
                length,
                mask,
                PACKED,
                PART_AXIS,
                RAGGED,
                HARDWARE,
                POWERS,
                SATURATES,
                LARGEST,
                LIMIT,
                ELEMENT_MANTISSA,
                ELEMENT_BIAS,
                ELEMENT_SIGN,
            )
            signal += squares
            noise += errors
            saturated += counts >> _COUNT_BITS
            flushed += counts & _COUNT
    to = statistics_ptr + tl.program_id(0) * _STATISTICS
    tl.store(to, tl.sum(signal))
    tl.store(to + 1, tl.sum(noise))
    tl.store(to + 2, tl.sum(saturated).to(tl.float64))
    tl.store(to + 3, tl.sum(flushed).to(tl.float64))
    tl.store(to + 4, tl.sum(nonfinite, 0).to(tl.float64))


@triton.jit
def amax_of_chunks(w_ptr, amax_ptr, counts_ptr, count, BF16: tl.constexpr, CHUNK: tl.constexpr):
    """Write the bits of the largest finite magnitude of each chunk of ``[count]`` elements, and its NaN and Inf."""
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    magnitude = load_bits(w_ptr, offsets, offsets < count, BF16) & MAGNITUDE
    tl.store(amax_ptr + program, tl.max(tl.where(magnitude < INF_BITS, magnitude, 0), 0))
    tl.store(counts_ptr + program, tl.sum((magnitude >= INF_BITS).to(tl.int32), 0))
