"""What a decoder does between its linears, over a paged cache and on any device: four small ops of a step.

On a GPU each is one Triton kernel, so that a layer is nine launches: the four linears, `add_norm` twice, and the three
others. Elsewhere, and where Triton is not installed, it is plain PyTorch (`reference.py`). Nothing here waits for the
device, and with given shapes nothing depends on values: a step can be captured in a CUDA graph.

Numerics are those of `minifloat.kernels.decoder`: all in float32 but inputs and outputs of linears and queries, which
have the dtype of the model, and the cache.
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
    """The choice: what computes on the device of a tensor."""
    if x.is_cuda and is_installed():
        from minifloat.kernels.paged import triton

        return triton
    return reference


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``x += delta``, then the RMS norm of `x`.

    Args:
        x: float32 ``[T, hidden]``, the residual stream; changed.
        delta: ``[T, hidden]``, or None: nothing is added.
        weight: float32 ``[hidden]``.
        eps: Of the norm.
        dtype: Of the result.

    Returns:
        ``[T, hidden]``.
    """
    normed: Tensor = _on(x).add_norm(x, delta, weight, eps, dtype)
    return normed


def rotary_table(inv_freq: Tensor, attention_scaling: float, positions: int) -> Tensor:
    """float32 ``[positions, 2, rotary_dim / 2]``: cosines and sines of every position, times `attention_scaling`."""
    angles = torch.arange(positions, device=inv_freq.device, dtype=torch.float32)[:, None] * inv_freq
    return torch.stack([angles.cos(), angles.sin()], dim=1) * attention_scaling


def rotate_and_store(
    qkv: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
    rotary: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: PagedCache,
    layer: int,
) -> Tensor:
    """Norms of q and k, the rotation, and new keys and values into the cache.

    Args:
        qkv: ``[T, (heads + 2 * kv_heads) * d]``: q, k and v of each token.
        norms: float32 ``[d]`` each: the weights of RMS norms of every head of q and of k; or None.
        eps: Of these norms.
        rotary: Of `rotary_table`.
        positions: int32 ``[T]``, below the table's.
        slots: int32 ``[T]``: block times `BLOCK_TOKENS` plus row. The caller sees that they exist.
        cache: Written.
        layer: Which layer of it.

    Returns:
        q, ``[T, heads, d]``, the dtype of `qkv`.
    """
    q: Tensor = _on(qkv).rotate_and_store(qkv, norms, eps, rotary, positions, slots, cache, layer)
    return q


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[T, 2 * intermediate]``, gate first: ``[T, intermediate]``, the same dtype."""
    product: Tensor = _on(gate_up).silu_and_multiply(gate_up)
    return product


def attend(
    q: Tensor, positions: Tensor, tables: Tensor, cache: PagedCache, layer: int, scale: float, window: int | None
) -> Tensor:
    """Softmax attention of one token of each sequence over its keys, its own among them.

    The bits of a row depend on its own keys and position alone, not on the batch.

    Args:
        q: ``[T, heads, d]``.
        positions: int32 ``[T]``.
        tables: int32 ``[T, W]``: key n of row t lies in block ``tables[t, n // BLOCK_TOKENS]``. Entries beyond the
            position are not looked at, but have to be blocks of the cache.
        cache: Keys and values.
        layer: Which layer of it.
        scale: Multiplies the product of q and k.
        window: A query sees the last `window` keys; None: all.

    Returns:
        ``[T, heads * d]``, the dtype of `q`.
    """
    out: Tensor = _on(q).attend(q, positions, tables, cache, layer, scale, window)
    return out


def attend_piece(
    q: Tensor, start: int, blocks: Tensor, cache: PagedCache, layer: int, scale: float, window: int | None
) -> Tensor:
    """The same for several tokens of one sequence, in a row: torch's attention over keys that are gathered first.

    Args:
        q: ``[n, heads, d]``, of the tokens at positions ``start .. start + n - 1``.
        start: How many tokens are before them.
        blocks: Integers: the blocks of the sequence up to its last token.
        cache: Keys and values; those of these tokens are there already.
        layer: Which layer of it.
        scale: Multiplies the product of q and k.
        window: As in `attend`.

    Returns:
        ``[n, heads * d]``, the dtype of `q`. E4M3 keys and values are rounded to it after their scale.
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
