"""Qwen3-Next and Qwen3.5: a gated delta rule in most layers, attention with a gate in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minifloat.model.architecture.decoder import parts
from minifloat.model.architecture.decoder.plan import (
    AttentionPlan,
    DecoderPlan,
    DeltaPlan,
    ExpertsPlan,
    LayerPlan,
    LinearPlan,
    MlpPlan,
    NormPlan,
    NotNative,
    RouterPlan,
)

#: Layers for multi-token prediction.
_UNUSED = (r"^(model\.)?mtp(\.|$)",)


def qwen3_next(config: Any) -> DecoderPlan:
    """Return the plan of a Qwen3-Next: projections ordered by key head, experts in most layers."""

    def mlp(config: Any, index: int) -> MlpPlan | ExpertsPlan:
        is_sparse = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
        if is_sparse and index not in config.mlp_only_layers:
            return _experts(config, index, normalize=bool(config.norm_topk_prob))
        return parts.mlp(config, f"{parts.layer_name(index)}.mlp", int(config.intermediate_size))

    return _decoder(config, mlp, grouped=True)


def qwen3_5(config: Any) -> DecoderPlan:
    """Return the plan of the text model of a Qwen3.5."""

    def mlp(config: Any, index: int) -> MlpPlan:
        return parts.mlp(config, f"{parts.layer_name(index)}.mlp", int(config.intermediate_size))

    return _decoder(config, mlp)


def qwen3_5_moe(config: Any) -> DecoderPlan:
    """Return the plan of the text model of a Qwen3.5 mixture: experts in every layer."""
    return _decoder(config, _experts)


def _decoder(config: Any, mlp: Any, *, grouped: bool = False) -> DecoderPlan:
    """Return a model."""
    if "full_attention" not in config.layer_types:
        raise NotNative("none of its layers has attention")

    def layer(config: Any, index: int) -> LayerPlan:
        kind = config.layer_types[index]
        if kind == "linear_attention":
            attention: AttentionPlan | DeltaPlan = _delta(config, index, grouped=grouped)
        elif kind == "full_attention":
            attention = _attention(config, index)
        else:
            raise NotNative(f"layer {index} has {kind!r}")
        plan = parts.pre_norm_layer(config, index, attention, mlp(config, index))
        return replace(plan, input_norm=_offset(plan.input_norm), mlp_norm=_offset(plan.mlp_norm))

    plan = parts.decoder(config, layer, _offset(parts.rms_norm(config, "model.norm")))
    return replace(plan, unused=_UNUSED)


def _attention(config: Any, index: int) -> AttentionPlan:
    """Return attention whose results are multiplied by gates that are rows of q_proj."""
    bias = bool(config.attention_bias)
    attention = parts.attention(config, index, bias=bias, out_bias=bias)
    norms: dict[str, Any] = {name: _offset(norm) for name, norm in parts.head_norms(config, index).items()}
    query, *others = attention.qkv
    query = replace(query, shape=(2 * query.shape[0], query.shape[1]))
    rotary = parts.rotary(config, attention.head_dim, partial=True)
    return replace(attention, qkv=(query, *others), rotary=rotary, gated=True, **norms)


def _delta(config: Any, index: int, *, grouped: bool) -> DeltaPlan:
    """Return the gated delta rule of a layer."""
    if config.hidden_act not in ("silu", "swish"):
        raise NotNative(f"the convolutions of its delta rule have the activation {config.hidden_act!r}, not 'silu'")
    name, hidden = f"{parts.layer_name(index)}.linear_attn", int(config.hidden_size)
    k_heads, v_heads = int(config.linear_num_key_heads), int(config.linear_num_value_heads)
    k_dim, v_dim = int(config.linear_key_head_dim), int(config.linear_value_head_dim)
    width = int(config.linear_conv_kernel_dim)
    if min(k_heads, v_heads, k_dim, v_dim, width) < 1:
        raise ValueError("linear_*: expected numbers of at least 1")
    if v_heads % k_heads:
        raise ValueError(f"linear_num_value_heads: expected a multiple of {k_heads} key heads, found {v_heads}")
    keys, values = k_heads * k_dim, v_heads * v_dim
    if grouped:
        qkvz, ba = {"qkvz": 2 * keys + 2 * values}, {"ba": 2 * v_heads}
    else:
        qkvz, ba = {"qkv": 2 * keys + values, "z": values}, {"b": v_heads, "a": v_heads}
    return DeltaPlan(
        k_heads=k_heads,
        v_heads=v_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        conv_width=width,
        qkvz=tuple(LinearPlan(f"{name}.in_proj_{leaf}", (rows, hidden)) for leaf, rows in qkvz.items()),
        ba=tuple(LinearPlan(f"{name}.in_proj_{leaf}", (rows, hidden)) for leaf, rows in ba.items()),
        out=LinearPlan(f"{name}.out_proj", (hidden, values)),
        conv=f"{name}.conv1d.weight",
        decay=f"{name}.A_log",
        dt_bias=f"{name}.dt_bias",
        norm=parts.rms_norm(config, f"{name}.norm", v_dim),
        grouped=grouped,
    )


def _experts(config: Any, index: int, *, normalize: bool = True) -> ExpertsPlan:
    """Return experts, and one that all tokens use, behind a gate."""
    name = f"{parts.layer_name(index)}.mlp"
    router = RouterPlan(f"{name}.gate.weight", int(config.num_experts_per_tok), normalize=normalize)
    plan = parts.experts(config, name, int(config.num_experts), int(config.moe_intermediate_size), router)
    shared = parts.mlp(config, f"{name}.shared_expert", int(config.shared_expert_intermediate_size))
    return replace(plan, shared=shared, shared_gate=f"{name}.shared_expert_gate.weight")


def _offset(norm: NormPlan | None) -> NormPlan:
    """Return a norm whose weights are stored less one."""
    assert norm is not None
    return replace(norm, offset=1.0)
