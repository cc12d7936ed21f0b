"""The ops of a decoder step between its linears, with a paged cache: Triton kernels and their reference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from minifloat.kernels.decoder.types import BLOCK_TOKENS
from minifloat.kernels.paged.cache import ELEMENTS, PagedCache
from minifloat.kernels.triton_runtime import is_installed

__all__ = [
    "ELEMENTS",
    "PagedCache",
    "add_norm",
    "attend",
    "attend_piece",
    "rotate_and_store",
    "rotary_table",
    "silu_and_multiply",
]


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and is_installed()


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add `delta` to `x` and return the RMS norm of the sum."""
    if _has_kernels(x):
        from minifloat.kernels.paged import triton

        return triton.add_norm(x, delta, weight, eps, dtype)
    if delta is not None:
        x += delta
    return _norm(x, weight, eps).to(dtype)


def rotary_table(inv_freq: Tensor, attention_scaling: float, positions: int) -> Tensor:
    """Return scaled cosines and sines of each position: float32 ``[positions, 2, rotary_dim / 2]``."""
    angles = torch.arange(positions, device=inv_freq.device, dtype=torch.float32)[:, None] * inv_freq
    return torch.stack([angles.cos(), angles.sin()], dim=1) * attention_scaling


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
    """Norm and rotate q and k, and write the new keys and values into the cache."""
    if _has_kernels(qkv):
        from minifloat.kernels.paged import triton

        return triton.rotate_and_store(qkv, norms, eps, rotary, positions, cache_rows, cache, layer)
    kv_heads, d = cache.data.shape[3], cache.data.shape[5]
    heads = qkv.shape[-1] // d - 2 * kv_heads
    q, k, v = torch.split_with_sizes(qkv.float().view(qkv.shape[0], -1, d), [heads, kv_heads, kv_heads], 1)
    q, k = (x if weight is None else _norm(x, weight, eps) for x, weight in zip((q, k), norms, strict=True))
    turn = rotary[positions.long()]
    cache.write(layer, cache_rows, _rotate(k, turn), v)
    return _rotate(q, turn).to(qkv.dtype)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of ``[T, 2 * intermediate]``, gate first: ``[T, intermediate]``, the same dtype."""
    if _has_kernels(gate_up):
        from minifloat.kernels.paged import triton

        return triton.silu_and_multiply(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def attend(
    q: Tensor, positions: Tensor, tables: Tensor, cache: PagedCache, layer: int, scale: float, window: int | None
) -> Tensor:
    """Compute softmax attention of one token of each sequence over its keys, its own included."""
    if _has_kernels(q):
        from minifloat.kernels.paged import triton

        return triton.attend(q, positions, tables, cache, layer, scale, window)
    keys, values = cache.read(layer, tables)
    distance = positions[:, None] - torch.arange(keys.shape[1], device=q.device)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    grouped = q.float().view(q.shape[0], keys.shape[2], -1, q.shape[2])
    scores = torch.einsum("tkgd,tnkd->tkgn", grouped, keys) * scale
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(dim=-1)
    values = values.masked_fill(hidden[..., None, None], 0)  # zero times undefined memory may be NaN
    return torch.einsum("tkgn,tnkd->tkgd", weights, values).flatten(1).to(q.dtype)


def attend_piece(
    q: Tensor, start: int, blocks: Tensor, cache: PagedCache, layer: int, scale: float, window: int | None
) -> Tensor:
    """Compute softmax attention of consecutive tokens of one sequence: gather the keys, then call torch's attention."""
    n, heads, _ = q.shape
    context = start + n
    first = 0 if window is None else max(start - window + 1, 0) // BLOCK_TOKENS
    begin = first * BLOCK_TOKENS
    keys, values = (
        x[: context - begin].to(q.dtype).repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)[None]
        for x in cache.read(layer, blocks[first : -(-context // BLOCK_TOKENS)])
    )
    mask = None
    if start > 0 or (window is not None and window < n):
        distance = torch.arange(start, context, device=q.device)[:, None] - torch.arange(
            begin, context, device=q.device
        )
        mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    queries = q.transpose(0, 1)[None]
    out = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out[0].transpose(0, 1).flatten(1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over the last dimension, in float32."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate pairs of dimensions of ``[T, heads, d]``; `turn`: cosines and sines ``[T, 2, rotary_dim / 2]``."""
    cos, sin = turn[:, None, 0], turn[:, None, 1]
    half = cos.shape[-1]
    first, second, rest = torch.split_with_sizes(x, [half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
