"""The step in plain PyTorch: the specification and the reference of the C++ step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from minifloat.kernels.decoder.attention import Attention, DeltaNet, Latent
from minifloat.kernels.decoder.cache import KVCache, SequenceStates
from minifloat.kernels.decoder.mlp import Experts, LayerInput, LayerInputs, Mlp
from minifloat.kernels.decoder.norm import Norm
from minifloat.kernels.decoder.types import BLOCK_TOKENS, Decoder, Layer, StepBatch
from minifloat.kernels.decoder_layout import Activation
from minifloat.kernels.linear import int8
from minifloat.kernels.pack import PackedWeight


def step(decoder: Decoder, cache: KVCache, batch: StepBatch, states: SequenceStates | None = None) -> Tensor:
    x = decoder.embedding[batch.tokens].float() * decoder.embedding_factor
    inputs = None if decoder.inputs is None else _inputs(decoder, decoder.inputs, batch.tokens, x)
    turns = {rotary: rotary.turns(batch.positions) for rotary in decoder.rotaries}
    for i, layer in enumerate(decoder.layers):
        attention, normed = layer.attention, _normed(x, layer.input_norm).to(decoder.dtype)
        if isinstance(attention, DeltaNet):
            assert states is not None
            state = states.data[:, decoder.states_before[i] : decoder.states_before[i + 1]]
            attended = _delta(decoder, attention, batch, state, normed).float()
        else:
            turn = None if attention.rotary is None else turns[attention.rotary]
            attended = _attention(decoder, attention, decoder.caches[i], cache, batch, turn, normed).float()
        before = x
        x = x + _normed(attended, layer.attention_norm) * layer.residual_factor
        if not layer.parallel:
            normed = _normed(x, layer.mlp_norm).to(decoder.dtype)
        elif layer.mlp_norm is not None:
            normed = layer.mlp_norm(before).to(decoder.dtype)
        x = x + _result(decoder, layer, before if layer.parallel else x, normed) * layer.residual_factor
        if layer.input is not None and inputs is not None:
            x = x + _from_input(decoder, layer.input, x, inputs[:, i])
        x = x * layer.scalar
    normed = decoder.norm(x[batch.logits]).to(decoder.dtype)
    logits = _linear(decoder, normed, decoder.lm_head).float() * decoder.logits_factor
    return logits if decoder.logits_cap is None else _capped(logits, decoder.logits_cap)


def _result(decoder: Decoder, layer: Layer, x: Tensor, normed: Tensor) -> Tensor:
    """Return what the MLP or the experts add to the residual stream `x`, of which `normed` is their norm."""
    experts = layer.mlp
    if isinstance(experts, Mlp):
        return _normed(_mlp(decoder, experts, normed).float(), layer.result_norm)
    if experts.norms is None or experts.shared is None:
        return _experts(decoder, experts, normed, normed)
    norms, dtype = experts.norms, decoder.dtype
    mixture = replace(experts, shared=None, norms=None)
    chosen = _experts(decoder, mixture, norms.input(x).to(dtype), norms.router(x).to(dtype))
    shared = _mlp(decoder, experts.shared, normed).float()
    return _normed(norms.mlp(shared) + norms.experts(chosen), layer.result_norm)


def _inputs(decoder: Decoder, inputs: LayerInputs, tokens: Tensor, x: Tensor) -> Tensor:
    """Return the inputs of all layers, float32 ``[T, layers, size]``, for the embeddings `x` of tokens."""
    projected = _linear(decoder, x.to(decoder.dtype), inputs.projection).float()
    rows = inputs.table[tokens].float() * inputs.table_factor
    shape = (len(tokens), len(decoder.layers), inputs.size)
    return (inputs.norm(projected.view(shape)) + rows.view(shape)) * inputs.factor


def _from_input(decoder: Decoder, layer: LayerInput, x: Tensor, values: Tensor) -> Tensor:
    gate = _linear(decoder, x.to(decoder.dtype), layer.gate)
    inner = activated(layer.activation, torch.cat([gate, values.to(gate.dtype)], dim=-1).float())
    return layer.norm(_linear(decoder, inner.to(decoder.dtype), layer.out).float())


def _attention(
    decoder: Decoder,
    attention: Attention,
    layer: int,
    cache: KVCache,
    batch: StepBatch,
    turn: tuple[Tensor, Tensor] | None,
    x: Tensor,
) -> Tensor:
    """Write the new keys and values into cache `layer`; return ``[T, hidden]`` in the decoder's dtype."""
    q, k, v, gate = _heads(decoder, attention, x, turn)
    q = q.to(decoder.dtype).float()
    scales = (attention.k_scale, attention.v_scale)
    starts, contexts = batch.starts.tolist(), batch.contexts.tolist()
    out = torch.empty(*q.shape[:2], attention.head_dim if attention.latent is None else attention.latent.rank)
    for s, context in enumerate(contexts):
        rows = slice(starts[s], starts[s + 1])
        positions = batch.positions[rows].long()
        blocks = batch.blocks[s].long()
        if k is not None:
            cache_rows = blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
            cache.write(layer, cache_rows, k[rows], None if v is None else v[rows], scales)
        # Blocks before the window may belong to another sequence already.
        begin = _first_key(attention, int(positions[0])) // BLOCK_TOKENS
        keys, values = cache.read(layer, blocks[begin : -(-context // BLOCK_TOKENS)], scales)
        begin *= BLOCK_TOKENS
        keys, values = keys[: context - begin], values[: context - begin]
        out[rows] = _attend(attention, q[rows], keys, values, positions, begin)
    out = out.to(decoder.dtype)
    if gate is not None:
        out = (out.float() * gate.sigmoid()).to(decoder.dtype)
    if attention.latent is not None:
        out = attention.latent.expanded(out, functools.partial(_linear, decoder))
    return _linear(decoder, out.flatten(1), attention.out, attention.out_bias)


def _delta(decoder: Decoder, delta: DeltaNet, batch: StepBatch, states: Tensor, x: Tensor) -> Tensor:
    """Continue the states ``[slots, floats]`` of a layer; return ``[T, hidden]`` in the decoder's dtype."""
    assert batch.slots is not None
    products = (_side_by_side(decoder, x, weights).float() for weights in (delta.qkvz, delta.ba))
    parts = delta.split(*products)
    out = torch.empty(len(x), delta.out.shape[1])
    for s, slot in enumerate(batch.slots.tolist()):
        rows = slice(int(batch.starts[s]), int(batch.starts[s + 1]))
        if int(batch.positions[rows][0]) == 0:
            states[slot] = 0.0
        inputs, z, b, a = (part[rows] for part in parts)
        out[rows] = delta.run(inputs, z, b, a, states[slot])
    return _linear(decoder, out.to(decoder.dtype), delta.out)


def _heads(
    decoder: Decoder, attention: Attention, x: Tensor, turn: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return q, k and v of rows, float32 ``[T, heads, d]``, normed and rotated, and the gates of the results."""
    if attention.latent is not None:
        return *_latent_heads(decoder, attention, attention.latent, x, turn), None, None
    product = _side_by_side(decoder, x, attention.qkv, attention.qkv_bias).float()
    if attention.clip is not None:
        product = product.clamp(-attention.clip, attention.clip)
    sections = torch.split_with_sizes(product, attention.sections, dim=-1)
    parts = [part.view(len(x), -1, attention.head_dim) for part in sections]
    gate = None
    if attention.gated:
        parts[0], gate = parts[0][:, ::2], parts[0][:, 1::2]
    norms = [attention.q_norm, attention.k_norm]
    prepared = []
    for part, norm in zip(parts[:2], norms, strict=False):
        normed = part if norm is None else _normed_heads(part, norm, attention.whole_norms)
        prepared.append(normed if turn is None or attention.rotary is None else attention.rotary.rotate(normed, turn))
    if len(parts) == 1:
        return prepared[0], None, None, gate
    return prepared[0], prepared[1], _normed(parts[-1], attention.v_norm), gate


def _latent_heads(
    decoder: Decoder, attention: Attention, latent: Latent, x: Tensor, turn: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return q ``[T, heads, d]`` and k ``[T, 1, d]`` of latent attention."""

    def turned(part: Tensor) -> Tensor:
        return part if turn is None or attention.rotary is None else attention.rotary.rotate(part.float(), turn)

    product = _side_by_side(decoder, x, attention.qkv, attention.qkv_bias)
    q, key = torch.split_with_sizes(product, attention.sections, dim=-1)
    if latent.q_up is not None:
        q = _linear(decoder, _normed(q.float(), latent.q_norm).to(x.dtype), latent.q_up)
    q = q.view(len(x), attention.heads, -1)
    plain = latent.multiplied(q[..., : latent.plain], functools.partial(_linear, decoder)).float()
    c = _normed(key[:, : latent.rank].float(), latent.kv_norm)[:, None]
    k = turned(key[:, None, latent.rank :])
    return torch.cat([plain, turned(q[..., latent.plain :])], dim=-1), torch.cat([c, k], dim=-1)


def _normed_heads(x: Tensor, norm: Norm, whole: bool) -> Tensor:
    """Norm each of the heads ``[T, heads, d]``, or all together; weights are ``[d]`` or ``[heads * d]``."""
    normed = norm.plain(x.flatten(1)).view_as(x) if whole else norm.plain(x)
    heads = [part.view(-1, x.shape[-1]) for part in (norm.weight, norm.bias) if part is not None]
    normed = normed * heads[0]
    return normed if norm.bias is None else normed + heads[1]


def _attend(attention: Attention, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, begin: int) -> Tensor:
    """Softmax attention of one sequence: ``[n, heads, d]`` for keys ``[m, kv_heads, d]`` from position `begin` on."""
    group = attention.heads // attention.kv_heads
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("nhd,mhd->hnm", q, keys) * attention.scale
    if attention.score_cap is not None:
        scores = _capped(scores, attention.score_cap)
    distance = positions[:, None] - (begin + torch.arange(keys.shape[0]))
    hidden = distance < 0
    if attention.window is not None:
        hidden |= distance >= attention.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if attention.sinks is not None:
        sinks = attention.sinks[:, None, None].expand(-1, len(q), 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("hnm,mhd->nhd", weights, values)


def _first_key(attention: Attention, position: int) -> int:
    return 0 if attention.window is None else max(position - attention.window + 1, 0)


def _mlp(decoder: Decoder, mlp: Mlp, x: Tensor) -> Tensor:
    inner = activated(mlp.activation, _side_by_side(decoder, x, mlp.gate_up, mlp.gate_up_bias).float())
    return _linear(decoder, inner.to(x.dtype), mlp.down, mlp.down_bias)


def activated(activation: Activation, x: Tensor) -> Tensor:
    """Apply a function to float32 rows ``[.., 2 * n]`` of gate and up, or to rows ``[.., n]`` where it is not gated."""
    if not activation.gated:
        return _function(activation.name, x)
    gate, up = x.chunk(2, dim=-1)
    if activation.name != "clamped_swiglu":
        return _function(activation.name, gate) * up
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * activation.alpha))


def _function(kind: str, x: Tensor) -> Tensor:
    if kind in ("gelu", "gelu_tanh"):
        return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    if kind in ("relu", "relu2"):
        return functional.relu(x) ** (2 if kind == "relu2" else 1)
    return functional.silu(x)


def _experts(decoder: Decoder, experts: Experts, x: Tensor, routed: Tensor) -> Tensor:
    """Return the weighted sum of the experts that `routed` chooses, float32 ``[T, hidden]``."""
    weights, chosen = experts.router(routed)
    out = torch.zeros(x.shape[0], experts.down.shape[0])
    for e in sorted(set(chosen.flatten().tolist())):
        tokens, place = (chosen == e).nonzero(as_tuple=True)
        biases = None if experts.gate_up_bias is None else [bias[e] for bias in experts.gate_up_bias]
        inner = _side_by_side(decoder, x[tokens], [part[e] for part in experts.gate_up], biases).float()
        down_bias = None if experts.down_bias is None else experts.down_bias[e]
        y = _linear(decoder, activated(experts.activation, inner).to(x.dtype), experts.down[e], down_bias)
        out[tokens] += weights[tokens, place, None] * y.float()
    if experts.shared is not None:
        shared = _mlp(decoder, experts.shared, x).float()
        if experts.shared_gate is not None:
            shared = shared * (x.float() @ experts.shared_gate).sigmoid()[:, None]
        out += shared
    return out


def _side_by_side(
    decoder: Decoder, x: Tensor, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None] | None = None
) -> Tensor:
    pairs = zip(weights, biases or [None] * len(weights), strict=True)
    return torch.cat([_linear(decoder, x, weight, bias) for weight, bias in pairs], dim=-1)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else norm(x)


def _capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def _linear(decoder: Decoder, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply and sum in float32 with the unrounded weight, as the kernels do; round the result once."""
    if decoder.int8_inputs:
        return int8.linear(x, weight.unpack(), bias)
    return functional.linear(x.float(), weight.dequantize(), None if bias is None else bias.float()).to(x.dtype)
