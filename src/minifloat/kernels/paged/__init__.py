"""The ops of a decoder step between its linears, with a paged cache, on any device."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from minifloat.kernels.decoder.types import BLOCK_TOKENS
from minifloat.kernels.paged import reference
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


def _on(x: Tensor) -> ModuleType:
    if x.is_cuda and is_installed():
        from minifloat.kernels.paged import triton

        return triton
    return reference


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add `delta` to `x` and return the RMS norm of the sum."""
    normed: Tensor = _on(x).add_norm(x, delta, weight, eps, dtype)
    return normed


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
    q: Tensor = _on(qkv).rotate_and_store(qkv, norms, eps, rotary, positions, cache_rows, cache, layer)
    return q


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of ``[T, 2 * intermediate]``, gate first: ``[T, intermediate]``, the same dtype."""
    product: Tensor = _on(gate_up).silu_and_multiply(gate_up)
    return product


def attend(
    q: Tensor, positions: Tensor, tables: Tensor, cache: PagedCache, layer: int, scale: float, window: int | None
) -> Tensor:
    """Compute softmax attention of one token of each sequence over its keys, its own included."""
    out: Tensor = _on(q).attend(q, positions, tables, cache, layer, scale, window)
    return out


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
