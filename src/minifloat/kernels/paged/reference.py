"""The ops in plain PyTorch, the reference of the Triton kernels: `minifloat.kernels.decoder.reference`, op by op."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from minifloat.kernels.paged.cache import PagedCache


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Implement `minifloat.kernels.paged.add_norm`."""
    if delta is not None:
        x += delta
    return norm(x, weight, eps).to(dtype)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over the last dimension, in float32."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


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
    """Implement `minifloat.kernels.paged.rotate_and_store`."""
    kv_heads, d = cache.data.shape[3], cache.data.shape[5]
    heads = qkv.shape[-1] // d - 2 * kv_heads
    q, k, v = torch.split_with_sizes(qkv.float().view(qkv.shape[0], -1, d), [heads, kv_heads, kv_heads], 1)
    q, k = (x if weight is None else norm(x, weight, eps) for x, weight in zip((q, k), norms, strict=True))
    turn = rotary[positions.long()]
    cache.write(layer, cache_rows, _rotate(k, turn), v)
    return _rotate(q, turn).to(qkv.dtype)


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate pairs of dimensions of ``[T, heads, d]``; `turn`: cosines and sines ``[T, 2, rotary_dim / 2]``."""
    cos, sin = turn[:, None, 0], turn[:, None, 1]
    half = cos.shape[-1]
    first, second, rest = torch.split_with_sizes(x, [half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Implement `minifloat.kernels.paged.silu_and_multiply`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def attend(
    q: Tensor, positions: Tensor, tables: Tensor, cache: PagedCache, layer: int, scale: float, window: int | None
) -> Tensor:
    """Implement `minifloat.kernels.paged.attend`."""
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
