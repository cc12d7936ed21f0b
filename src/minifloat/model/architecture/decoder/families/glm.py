"""Phi-3 and 4, GLM-4 and its mixtures, dots.llm1, MiniMax-M2: partial rotary embeddings, routers by sigmoid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minifloat.kernels.decoder_layout import (
    AttentionLayout,
    ExpertsLayout,
    LayerLayout,
    LinearLayout,
    MlpLayout,
    NotNative,
    RouterLayout,
)
from minifloat.model.architecture.decoder import parts


def phi3(config: Any, index: int) -> LayerLayout:
    """Return a layer of a Phi-3 or Phi-4: q, k and v are one linear, and so are gate and up."""
    attention = parts.attention(config, index)
    rows = sum(linear.shape[0] for linear in attention.qkv)
    name = f"{parts.layer_name(index)}.self_attn.qkv_proj"
    attention = replace(
        attention,
        qkv=(LinearLayout(name, (rows, int(config.hidden_size))),),
        window=config.sliding_window,
        rotary=parts.rotary(config, attention.head_dim, partial=True),
    )
    return parts.pre_norm_layer(config, index, attention, _fused_mlp(config, index))


def glm(config: Any, index: int) -> LayerLayout:
    """Return a layer of a GLM-4 of the first kind: neighbouring dimensions turn together."""
    return parts.pre_norm_layer(config, index, _attention(config, index), _fused_mlp(config, index))


def glm4(config: Any, index: int) -> LayerLayout:
    """Return a layer of a GLM-4-0414: norms of both results besides."""
    layout = parts.pre_norm_layer(config, index, _attention(config, index), _fused_mlp(config, index))
    return replace(
        layout,
        attention_norm=parts.rms_norm(config, f"{layout.name}.post_self_attn_layernorm"),
        result_norm=parts.rms_norm(config, f"{layout.name}.post_mlp_layernorm"),
    )


def glm4_moe(config: Any, index: int) -> LayerLayout:
    """Return a layer of a GLM-4.5 to 4.7: experts by sigmoid, in groups, and shared experts."""
    attention = parts.attention(config, index, bias=bool(config.attention_bias))
    rotary = parts.rotary(config, attention.head_dim, partial=True)
    norms = parts.head_norms(config, index) if config.use_qk_norm else {}
    attention = replace(attention, rotary=rotary, **norms)
    return parts.pre_norm_layer(config, index, attention, experts_in_groups(config, index))


def dots1(config: Any, index: int) -> LayerLayout:
    """Return a layer of a dots.llm1: norms of heads, windows in some layers, experts as in GLM-4.5."""
    bias = bool(config.attention_bias)
    attention = parts.attention(config, index, bias=bias, out_bias=bias)
    window = parts.sliding_window(config, index)
    attention = replace(attention, window=window, **parts.head_norms(config, index))
    return parts.pre_norm_layer(config, index, attention, experts_in_groups(config, index))


def minimax_m2(config: Any, index: int) -> LayerLayout:
    """Return a layer of a MiniMax-M2: norms of q and k over all heads, experts by sigmoid in one group."""
    attention = parts.attention(config, index)
    rotary = parts.rotary(config, attention.head_dim, partial=True)
    attention = replace(attention, rotary=rotary, **parts.whole_norms(config, index))
    name = f"{parts.layer_name(index)}.mlp"
    router = RouterLayout(
        f"{name}.gate.weight",
        top_k=int(config.num_experts_per_tok),
        kind="sigmoid",
        normalize=True,
        correction=f"{name}.e_score_correction_bias",
    )
    experts = parts.experts(config, name, int(config.num_local_experts), int(config.intermediate_size), router)
    return parts.pre_norm_layer(config, index, attention, experts)


def _attention(config: Any, index: int) -> AttentionLayout:
    attention = parts.attention(config, index, bias=bool(config.attention_bias))
    rotary = parts.rotary(config, attention.head_dim, partial=True, interleaved=True)
    return replace(attention, rotary=rotary)


def _fused_mlp(config: Any, index: int) -> MlpLayout:
    name = f"{parts.layer_name(index)}.mlp"
    return parts.fused_mlp(config, name, int(config.intermediate_size), ("gate_up_proj", "down_proj"))


def _experts_of(config: Any) -> int:
    count = getattr(config, "n_routed_experts", None) or getattr(config, "num_local_experts", None)
    if count is None:
        raise NotNative("its config states no number of experts")
    return int(count)


def experts_in_groups(config: Any, index: int, *, dense: bool | None = None) -> MlpLayout | ExpertsLayout:
    """Return the experts of a layer behind a router in groups, or its MLP."""
    name = f"{parts.layer_name(index)}.mlp"
    if index < config.first_k_dense_replace if dense is None else dense:
        return parts.mlp(config, name, int(config.intermediate_size))
    router = RouterLayout(
        f"{name}.gate.weight",
        top_k=int(config.num_experts_per_tok),
        kind="sigmoid",
        normalize=bool(config.norm_topk_prob),
        correction=f"{name}.gate.e_score_correction_bias",
        groups=int(config.n_group or 1),
        groups_kept=int(config.topk_group or 1),
        factor=float(config.routed_scaling_factor),
    )
    intermediate = int(config.moe_intermediate_size)
    layout = parts.experts(config, name, _experts_of(config), intermediate, router)
    shared = intermediate * int(config.n_shared_experts or 0)
    return replace(layout, shared=parts.mlp(config, f"{name}.shared_experts", shared)) if shared else layout
