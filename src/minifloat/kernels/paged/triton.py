"""The ops as Triton kernels, for NVIDIA GPUs from compute capability 8.0 on, with the numerics of `reference.py`."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,unused-ignore"
# ruff: noqa: SIM102 (a constant of the kernel first, then a value)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.kernels.decoder.types import BLOCK_TOKENS
from minifloat.kernels.paged.cache import PagedCache
from minifloat.kernels.triton_cast import INF_BITS, MAGNITUDE, bits_of, constants, encode_magnitude, sign_of
from minifloat.kernels.triton_overlap import launch_options, overlaps, wait
from minifloat.numerics.formats import E4M3, FLOAT16

#: Maximum number of programs that share the keys of a sequence. The cut depends only on the length, and the last
#: program to finish adds up all in order, so a row's bits do not depend on the batch.
_SPLITS = 32
#: Keys that a program holds at a time, its warps, and the head size above which it takes half the keys and twice the
#: warps.
_TILE, _WARPS, _WIDE = 64, 4, 128
_COLUMNS = 1024
#: Arguments that Triton must not specialize on: their values and alignment change from step to step, and compiling a
#: kernel again would delay all requests by seconds.
_STRIDES = ["window", "table_stride", "position_stride", "cache_row_stride"]
_NUMBERS = ["tables", "positions", "cache_rows"]


_MANTISSA, _BIAS, _MAX = (tl.constexpr(value) for value in constants(E4M3, "").values())
_NAN = tl.constexpr(E4M3.nan_code)
_SIGN = tl.constexpr(1 << (E4M3.bits - 1))
#: The exponent and mantissa bits of an E4M3 code, read as float16, are too small by this factor.
_REBIAS = tl.constexpr(2.0 ** (FLOAT16.bias - E4M3.bias))
_NARROW_SHIFT = tl.constexpr(FLOAT16.mantissa_bits - E4M3.mantissa_bits)
_NARROW_SIGN_SHIFT = tl.constexpr(FLOAT16.bits - E4M3.bits)


@triton.jit
def _encode(x):
    """Encode float32 as E4M3, to nearest, ties to even, clamped."""
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    code = encode_magnitude(magnitude, _MANTISSA, _BIAS, _MAX) | (sign_of(bits) * _SIGN)
    return tl.where(magnitude > INF_BITS, _NAN, code).to(tl.uint8)


@triton.jit
def _decode(codes):
    """Decode E4M3 codes to float16, exactly but without the factor `_REBIAS`."""
    code = codes.to(tl.int16)
    magnitude = code & _NAN
    bits = ((code & _SIGN) << _NARROW_SIGN_SHIFT) | (magnitude << _NARROW_SHIFT)
    return tl.where(magnitude == _NAN, float("nan"), bits.to(tl.float16, bitcast=True))


@triton.jit
def _add_norm(
    x, delta, weight, out, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    j = tl.arange(0, BLOCK)
    inside = j < HIDDEN
    scale = tl.load(weight + j, mask=inside, other=0.0)
    wait(OVERLAP)
    value = tl.load(x + row + j, mask=inside, other=0.0)
    if ADD:
        value += tl.load(delta + row + j, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row + j, value, mask=inside)
    factor = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    normed = value * factor * scale
    tl.store(out + row + j, normed.to(out.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    rows, hidden = x.shape
    out = torch.empty(rows, hidden, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(hidden)
    warps = min(max(block // 1024, 4), 16)
    overlap = overlaps(x.device)
    delta, add = (x, False) if delta is None else (delta, True)
    _add_norm[(rows,)](
        x, delta, weight, out, eps, hidden, block, add, overlap, num_warps=warps, **launch_options(overlap)
    )
    return out


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_NUMBERS)
def _rotate_and_store(
    qkv,
    q_norm,
    k_norm,
    rotary,
    positions,
    cache_rows,
    scales,
    queries,
    data,
    eps,
    position_stride,
    cache_row_stride,
    block_stride,
    value_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Handle one head of one token: of q, of k or of v."""
    wait(OVERLAP)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * D
    j = tl.arange(0, BLOCK)
    inside = j < D
    x = tl.load(source + j, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        turns = j < 2 * HALF
        partner = tl.where(j < HALF, j + HALF, tl.where(turns, j - HALF, j))
        y = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        if Q_NORM:
            if head < HEADS:
                x = x * factor * tl.load(q_norm + j, mask=inside, other=0.0)
                y = y * factor * tl.load(q_norm + partner, mask=inside, other=0.0)
        if K_NORM:
            if head >= HEADS:
                x = x * factor * tl.load(k_norm + j, mask=inside, other=0.0)
                y = y * factor * tl.load(k_norm + partner, mask=inside, other=0.0)
        angle = rotary + tl.load(positions + token * position_stride) * (2 * HALF) + j % HALF
        cos = tl.load(angle, mask=turns, other=0.0)
        sin = tl.load(angle + HALF, mask=turns, other=0.0)
        x = tl.where(turns, tl.where(j < HALF, x * cos - y * sin, x * cos + y * sin), x)
    if head < HEADS:
        tl.store(queries + (token * HEADS + head) * D + j, x.to(queries.dtype.element_ty), mask=inside)
    else:
        index = (head - HEADS) // KV_HEADS
        cache_row = tl.load(cache_rows + token * cache_row_stride).to(tl.int64)
        place = data + cache_row // TOKENS * block_stride + index * value_stride
        place += ((head - HEADS) % KV_HEADS * TOKENS + cache_row % TOKENS) * D
        if FP8:
            tl.store(place + j, _encode(tl.div_rn(x, tl.load(scales + head - HEADS))), mask=inside)
        else:
            tl.store(place + j, x.to(data.dtype.element_ty), mask=inside)


def rotate_and_store(
    qkv: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
    rotary: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    cache: PagedCache,
    layer: int,
) -> Tensor:
    data = cache.data[layer]
    kv_heads, d = data.shape[2], data.shape[4]
    heads = qkv.shape[-1] // d - 2 * kv_heads
    queries = torch.empty(qkv.shape[0], heads, d, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = norms
    overlap = overlaps(qkv.device)
    _rotate_and_store[(qkv.shape[0], heads + 2 * kv_heads)](
        qkv,
        rotary if q_norm is None else q_norm,
        rotary if k_norm is None else k_norm,
        rotary,
        positions,
        cache_rows,
        cache.scales[layer],
        queries,
        data,
        eps,
        positions.stride(0),
        cache_rows.stride(0),
        data.stride(0),
        data.stride(1),
        heads,
        kv_heads,
        d,
        triton.next_power_of_2(d),
        rotary.shape[-1],
        BLOCK_TOKENS,
        q_norm is not None,
        k_norm is not None,
        cache.element == E4M3.name,
        overlap,
        num_warps=1,
        **launch_options(overlap),
    )
    return queries


@triton.jit
def _silu_and_multiply(gate_up, out, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait(OVERLAP)
    row, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = j < COLUMNS
    gate = tl.load(gate_up + row * (2 * COLUMNS) + j, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * COLUMNS) + COLUMNS + j, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * COLUMNS + j, product.to(out.dtype.element_ty), mask=inside)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    overlap = overlaps(gate_up.device)
    grid = (rows, triton.cdiv(columns, _COLUMNS))
    _silu_and_multiply[grid](gate_up, out, columns, _COLUMNS, overlap, num_warps=4, **launch_options(overlap))
    return out


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_NUMBERS)
def _attend(
    queries,
    data,
    scales,
    tables,
    positions,
    partial,
    stats,
    counters,
    out,
    scale,
    window,
    table_stride,
    position_stride,
    block_stride,
    value_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context = tl.load(positions + row * position_stride) + 1
    first = 0
    if WINDOW:
        first = tl.maximum(context - window, 0)
    run = tl.cdiv(tl.cdiv(context - first, SPLITS), TILE) * TILE
    used = tl.cdiv(context - first, run)
    begin = first + split * run
    if begin >= context:
        return
    end = tl.minimum(begin + run, context)
    g, j, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    pair = row * KV_HEADS + head
    own = (g < GROUP)[:, None] & (j < D)[None, :]
    query = tl.load(queries + (pair * GROUP + g)[:, None] * D + j[None, :], mask=own, other=0.0)
    if data.dtype.element_ty == tl.float32:
        query = query.to(tl.float32)
    factor, spread = scale, 1.0
    if FP8:
        factor = scale * tl.load(scales + head) * _REBIAS
        spread = tl.load(scales + KV_HEADS + head) * _REBIAS
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    sums = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(begin, end, TILE):
        token = start + n
        visible = token < end
        block = tl.load(tables + row * table_stride + token // TOKENS, mask=visible, other=0).to(tl.int64)
        place = data + block * block_stride + (head * TOKENS + token % TOKENS) * D
        place = place[:, None] + j[None, :]
        inside = visible[:, None] & (j < D)[None, :]
        keys = tl.load(place, mask=inside, other=0)
        values = tl.load(place + value_stride, mask=inside, other=0)
        if FP8:
            keys, values = _decode(keys), _decode(values)
        scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee") * factor
        scores = tl.where(visible[None, :], scores, float("-inf"))
        best = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - best[:, None])
        shrink = tl.exp(top - best)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(query.dtype), values.to(query.dtype), input_precision="ieee")
        top = best
    target = out + (pair * GROUP + g)[:, None] * D + j[None, :]
    if used == 1:
        tl.store(target, (sums / total[:, None] * spread).to(out.dtype.element_ty), mask=own)
    else:
        mine = (pair * SPLITS + split) * GROUP + g
        tl.store(partial + mine[:, None] * D + j[None, :], sums, mask=own)
        tl.store(stats + mine * 2, top, mask=g < GROUP)
        tl.store(stats + mine * 2 + 1, total, mask=g < GROUP)
        tl.debug_barrier()  # finish the stores of this program before it is counted
        if tl.atomic_add(counters + pair, 1) == used - 1:
            tl.store(counters + pair, 0)  # for the next launch
            s = tl.arange(0, SPLITS)
            for each in tl.static_range(GROUP):
                run_index = (pair * SPLITS + s) * GROUP + each
                finished = s < used
                tops = tl.load(stats + run_index * 2, mask=finished, other=float("-inf"))
                share = tl.exp(tops - tl.max(tops, 0))
                whole = tl.sum(share * tl.load(stats + run_index * 2 + 1, mask=finished, other=0.0), 0)
                every = finished[:, None] & (j < D)[None, :]
                parts = tl.load(partial + run_index[:, None] * D + j[None, :], mask=every, other=0.0)
                merged = tl.sum(parts * share[:, None], 0) / whole * spread
                tl.store(out + (pair * GROUP + each) * D + j, merged.to(out.dtype.element_ty), mask=j < D)


def attend(
    q: Tensor, positions: Tensor, tables: Tensor, cache: PagedCache, layer: int, scale: float, window: int | None
) -> Tensor:
    rows, heads, d = q.shape
    data = cache.data[layer]
    kv_heads = data.shape[2]
    group = heads // kv_heads
    out = torch.empty(rows, heads * d, dtype=q.dtype, device=q.device)
    # Results of each run: the weighted sums; the largest score and the sum of the weights.
    partial = torch.empty(rows * heads * _SPLITS, d, dtype=torch.float32, device=q.device)
    stats = torch.empty(rows * heads * _SPLITS, 2, dtype=torch.float32, device=q.device)
    overlap = overlaps(q.device)
    _attend[(rows, kv_heads, _SPLITS)](
        q,
        data,
        cache.scales[layer],
        tables,
        positions,
        partial,
        stats,
        cache.counters,
        out,
        scale,
        window or 0,
        tables.stride(0),
        positions.stride(0),
        data.stride(0),
        data.stride(1),
        kv_heads,
        group,
        d,
        max(triton.next_power_of_2(group), 16),
        triton.next_power_of_2(d),
        BLOCK_TOKENS,
        _TILE if d <= _WIDE else _TILE // 2,
        _SPLITS,
        window is not None,
        cache.element == E4M3.name,
        overlap,
        num_warps=_WARPS if d <= _WIDE else 2 * _WARPS,
        **launch_options(overlap),
    )
    return out
