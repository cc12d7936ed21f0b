"""The step in plain PyTorch: the specification and the reference of the C++ step.

Everything is float32 except the inputs and outputs of linears and the queries, which have `Decoder.dtype`. It
dequantizes every weight in every step, so it is for tests, and for machines without the native library.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from minifloat.kernels.decoder.cache import KVCache
from minifloat.kernels.decoder.types import BLOCK_TOKENS, Attention, Decoder, Experts, Mlp, StepBatch
from minifloat.kernels.linear import int8_reference
from minifloat.kernels.pack import PackedWeight


def step(decoder: Decoder, cache: KVCache, batch: StepBatch) -> Tensor:
    """Implement `minifloat.kernels.decoder.step` for validated arguments."""
    x = decoder.embedding[batch.tokens].float()
    angles = batch.positions[:, None].float() * decoder.inv_freq
    turn = (angles.cos() * decoder.attention_scaling, angles.sin() * decoder.attention_scaling)
    for i, layer in enumerate(decoder.layers):
        normed = _norm(x, layer.input_norm, decoder.eps).to(decoder.dtype)
        x = x + _attention(decoder, layer.attention, i, cache, batch, turn, normed).float()
        normed = _norm(x, layer.mlp_norm, decoder.eps).to(decoder.dtype)
        x = x + (
            _mlp(decoder, layer.mlp, normed) if isinstance(layer.mlp, Mlp) else _experts(decoder, layer.mlp, normed)
        )
    normed = _norm(x[batch.logits], decoder.norm, decoder.eps).to(decoder.dtype)
    return _linear(decoder, normed, decoder.lm_head).float()


def _attention(
    decoder: Decoder,
    attention: Attention,
    layer: int,
    cache: KVCache,
    batch: StepBatch,
    turn: tuple[Tensor, Tensor],
    x: Tensor,
) -> Tensor:
    """Write the new keys and values into the cache; return ``[T, hidden]`` in the decoder's dtype."""
    biases = attention.qkv_bias or (None, None, None)
    q, k, v = (
        _linear(decoder, x, weight, bias).float().view(x.shape[0], -1, decoder.head_dim)
        for weight, bias in zip(attention.qkv, biases, strict=True)
    )
    if attention.q_norm is not None:
        q = _norm(q, attention.q_norm, decoder.eps)
    if attention.k_norm is not None:
        k = _norm(k, attention.k_norm, decoder.eps)
    q, k = _rotate(q, turn).to(decoder.dtype).float(), _rotate(k, turn)
    scales = (attention.k_scale, attention.v_scale)
    starts, contexts = batch.starts.tolist(), batch.contexts.tolist()
    out = torch.empty_like(q)
    for s, context in enumerate(contexts):
        rows = slice(starts[s], starts[s + 1])
        positions = batch.positions[rows].long()
        blocks = batch.blocks[s].long()
        slots = blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        cache.write(layer, slots, k[rows], v[rows], scales)
        # Blocks before the window may belong to another sequence already.
        begin = _first_key(attention, int(positions[0])) // BLOCK_TOKENS
        keys, values = cache.read(layer, blocks[begin : -(-context // BLOCK_TOKENS)], scales)
        begin *= BLOCK_TOKENS
        keys, values = keys[: context - begin], values[: context - begin]
        out[rows] = _attend(decoder, attention, q[rows], keys, values, positions, begin)
    return _linear(decoder, out.flatten(1).to(decoder.dtype), attention.out, attention.out_bias)


def _attend(
    decoder: Decoder, attention: Attention, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, begin: int
) -> Tensor:
    """Softmax attention of one sequence: ``[n, heads, d]`` for keys ``[m, kv_heads, d]`` from position `begin` on."""
    group = decoder.heads // decoder.kv_heads
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("nhd,mhd->hnm", q, keys) * decoder.scale
    distance = positions[:, None] - (begin + torch.arange(keys.shape[0]))
    hidden = distance < 0
    if attention.window is not None:
        hidden |= distance >= attention.window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hnm,mhd->nhd", weights, values)


def _first_key(attention: Attention, position: int) -> int:
    return 0 if attention.window is None else max(position - attention.window + 1, 0)


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of dimensions of ``[T, heads, d]``; `turn` holds cosines and sines ``[T, rotary_dim / 2]``."""
    cos, sin = (part[:, None] for part in turn)
    half = cos.shape[-1]
    first, second, rest = torch.split_with_sizes(x, [half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _mlp(decoder: Decoder, mlp: Mlp, x: Tensor) -> Tensor:
    """Return the result of an MLP, float32 ``[T, hidden]``."""
    biases = mlp.gate_up_bias or (None, None)
    gate, up = (_linear(decoder, x, weight, bias).float() for weight, bias in zip(mlp.gate_up, biases, strict=True))
    return _linear(decoder, (functional.silu(gate) * up).to(x.dtype), mlp.down, mlp.down_bias).float()


def _experts(decoder: Decoder, experts: Experts, x: Tensor) -> Tensor:
    """Return the weighted sum of the experts, float32 ``[T, hidden]``."""
    probabilities = functional.linear(x.float(), experts.router.float()).softmax(dim=-1)
    weights, chosen = probabilities.topk(experts.top_k, dim=-1)
    if experts.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros(x.shape[0], experts.down.shape[0])
    for e in sorted(set(chosen.flatten().tolist())):
        tokens, place = (chosen == e).nonzero(as_tuple=True)
        gate, up = _side_by_side(decoder, x[tokens], [part[e] for part in experts.gate_up]).float().chunk(2, dim=-1)
        y = _linear(decoder, (functional.silu(gate) * up).to(x.dtype), experts.down[e])
        out[tokens] += weights[tokens, place, None] * y.float()
    if experts.shared is not None:
        shared = _mlp(decoder, experts.shared, x)
        if experts.shared_gate is not None:
            shared = shared * (x.float() @ experts.shared_gate).sigmoid()[:, None]
        out += shared
    return out


def _side_by_side(decoder: Decoder, x: Tensor, weights: Sequence[PackedWeight]) -> Tensor:
    return torch.cat([_linear(decoder, x, weight) for weight in weights], dim=-1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _linear(decoder: Decoder, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply and sum in float32 with the unrounded weight, as the kernels do; round the result once."""
    if decoder.int8_inputs:
        return int8_reference.linear(x, weight.unpack(), bias)
    return functional.linear(x.float(), weight.dequantize(), None if bias is None else bias.float()).to(x.dtype)
