"""The ops of a decoder step between its linears, with a paged cache, on any device.

On a GPU each op is one Triton kernel, so that a layer has nine launches: the four linears, `add_norm` twice, and the
three others. On other devices, and without Triton, ops are plain PyTorch (`reference.py`). No op waits for the device,
and the launches depend on shapes only: a step can be captured in a CUDA graph.

Numerics are those of `minifloat.kernels.decoder`: everything is float32 except the inputs and outputs of linears and
the queries, which have the dtype of the model, and the cache.
"""

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
    """Return the module that computes on the device of a tensor."""
    if x.is_cuda and is_installed():
        from minifloat.kernels.paged import triton

        return triton
    return reference


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add `delta` to `x` and return the RMS norm of the sum.

    Args:
        x: float32 ``[T, hidden]``, the residual stream; changed.
        delta: ``[T, hidden]``, or None to add nothing.
        weight: float32 ``[hidden]``.
        eps: Epsilon of the norm.
        dtype: The dtype of the result.

    Returns:
        ``[T, hidden]``.
    """
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
    """Norm and rotate q and k, and write the new keys and values into the cache.

    Args:
        qkv: ``[T, (heads + 2 * kv_heads) * d]``: q, k and v of each token.
        norms: The weights of the RMS norms of q and of k per head, float32 ``[d]`` each, or None for no norm.
        eps: Epsilon of the norms.
        rotary: The result of `rotary_table`.
        positions: int32 ``[T]``, below the number of positions in `rotary`.
        cache_rows: int32 ``[T]``: block times `BLOCK_TOKENS` plus row. The caller ensures that they exist.
        cache: The cache; written.
        layer: Index of the layer.

    Returns:
        q, ``[T, heads, d]``, the dtype of `qkv`.
    """
    q: Tensor = _on(qkv).rotate_and_store(qkv, norms, eps, rotary, positions, cache_rows, cache, layer)
    return q


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of ``[T, 2 * intermediate]``, gate first: ``[T, intermediate]``, the same dtype."""
    product: Tensor = _on(gate_up).silu_and_multiply(gate_up)
    return product


def attend(
    q: Tensor, positions: Tensor, tables: Tensor, cache: PagedCache, layer: int, scale: float, window: int | None
) -> Tensor:
    """Compute softmax attention of one token of each sequence over its keys, its own included.

    The bits of a row depend only on its own keys and position, not on the batch.

    Args:
        q: ``[T, heads, d]``.
        positions: int32 ``[T]``.
        tables: int32 ``[T, W]``: key n of row t is in block ``tables[t, n // BLOCK_TOKENS]``. Entries beyond the
            position are not used, but must be blocks of the cache.
        cache: Keys and values.
        layer: Index of the layer.
        scale: Factor of the product of q and k.
        window: A query sees the last `window` keys; None for all keys.

    Returns:
        ``[T, heads * d]``, the dtype of `q`.
    """
    out: Tensor = _on(q).attend(q, positions, tables, cache, layer, scale, window)
    return out


def attend_piece(
    q: Tensor, start: int, blocks: Tensor, cache: PagedCache, layer: int, scale: float, window: int | None
) -> Tensor:
    """Compute softmax attention of consecutive tokens of one sequence: gather the keys, then call torch's attention.

    Args:
        q: ``[n, heads, d]``, the queries of the tokens at positions ``start .. start + n - 1``.
        start: Number of tokens before them.
        blocks: Integers: the blocks of the sequence up to its last token.
        cache: Keys and values, those of these tokens included.
        layer: Index of the layer.
        scale: Factor of the product of q and k.
        window: A query sees the last `window` keys; None for all keys.

    Returns:
        ``[n, heads * d]``, the dtype of `q`. E4M3 keys and values are scaled and then rounded to this dtype.
    """
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
