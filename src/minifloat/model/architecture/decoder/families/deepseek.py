"""DeepSeek-V2 and V3 (Kimi-K2 too), GLM-4.7-Flash, Youtu-LLM, MiniCPM3: latent attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from minifloat.kernels.decoder_layout import (
    AttentionLayout,
    DecoderLayout,
    ExpertsLayout,
    LatentLayout,
    LayerLayout,
    LinearLayout,
    MlpLayout,
    NormLayout,
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
    attention = parts.biased_attention(config, index)
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


#: Epsilon of the norms of latents in transformers' classes, whatever the config says.
_LATENT_EPS = 1e-6


def deepseek_v2(config: Any, index: int) -> LayerLayout:
    """Return a layer of a DeepSeek-V2: experts by softmax; groups count as their best expert."""
    attention = _latent_attention(config, index, interleaved=True)
    return parts.pre_norm_layer(config, index, attention, _experts_by_softmax(config, index))


def deepseek_v3(config: Any, index: int) -> LayerLayout:
    """Return a layer of a DeepSeek-V3 or R1, or of a Kimi-K2: experts by sigmoid, in groups."""
    attention = _latent_attention(config, index, interleaved=bool(config.rope_interleave))
    return parts.pre_norm_layer(config, index, attention, experts_in_groups(config, index))


def glm4_moe_lite(config: Any, index: int) -> LayerLayout:
    """Return a layer of a GLM-4.7-Flash: as DeepSeek-V3, with a list of the layers that have experts."""
    attention = _latent_attention(config, index, interleaved=bool(config.rope_interleave))
    dense = config.mlp_layer_types[index] != "sparse"
    return parts.pre_norm_layer(config, index, attention, experts_in_groups(config, index, dense=dense))


def youtu(config: Any, index: int) -> LayerLayout:
    """Return a layer of a Youtu-LLM: latent attention without experts."""
    attention = _latent_attention(config, index, interleaved=bool(config.rope_interleave))
    return parts.pre_norm_layer(config, index, attention, _mlp(config, index))


def minicpm3(config: Any) -> DecoderLayout:
    """Return the layout of a MiniCPM3: no pairs of neighbours turn; embeddings, results and logits have factors."""

    def layer(config: Any, index: int) -> LayerLayout:
        attention = _latent_attention(config, index, interleaved=False)
        layer = parts.pre_norm_layer(config, index, attention, _mlp(config, index, bias=bool(config.mlp_bias)))
        return replace(layer, residual_factor=config.scale_depth / math.sqrt(config.num_hidden_layers))

    return replace(
        parts.decoder(config, layer),
        embedding_factor=float(config.scale_emb),
        rounds_embedding_factor=True,
        logits_factor=config.dim_model_base / config.hidden_size,
    )


def _latent_attention(config: Any, index: int, *, interleaved: bool) -> AttentionLayout:
    """Return latent attention; `interleaved`: whether neighbouring dimensions turn together."""
    name, hidden, heads = (
        f"{parts.layer_name(index)}.self_attn",
        int(config.hidden_size),
        int(config.num_attention_heads),
    )
    plain, turned, value = int(config.qk_nope_head_dim), int(config.qk_rope_head_dim), int(config.v_head_dim)
    rank, low = int(config.kv_lora_rank), config.q_lora_rank
    bias, queries = bool(config.attention_bias), heads * (plain + turned)
    if config.num_key_value_heads != heads:
        raise NotNative(f"it has {config.num_key_value_heads} key-value heads and {heads} heads, in latent attention")
    if low is None:
        q, q_up, q_norm = LinearLayout(f"{name}.q_proj", (queries, hidden)), None, None
    else:
        q = LinearLayout(f"{name}.q_a_proj", (low, hidden), bias)
        q_up = LinearLayout(f"{name}.q_b_proj", (queries, low))
        q_norm = NormLayout(f"{name}.q_a_layernorm.weight", (low,), _LATENT_EPS)
    rotary = parts.rotary(config, turned, interleaved=interleaved)
    return AttentionLayout(
        heads=heads,
        kv_heads=1,
        head_dim=rank + turned,
        scale=(plain + turned) ** -0.5 * _yarn_factor(dict(rotary.parameters)),
        qkv=(q, LinearLayout(f"{name}.kv_a_proj_with_mqa", (rank + turned, hidden), bias)),
        out=LinearLayout(f"{name}.o_proj", (hidden, heads * value), bias),
        rotary=rotary,
        values="latent",
        latent=LatentLayout(
            up=LinearLayout(f"{name}.kv_b_proj", (heads * (plain + value), rank)),
            plain=plain,
            value_dim=value,
            kv_norm=NormLayout(f"{name}.kv_a_layernorm.weight", (rank,), _LATENT_EPS),
            q_up=q_up,
            q_norm=q_norm,
        ),
    )


def _yarn_factor(rope: dict[str, Any]) -> float:
    """Return the factor of scores under a stretched rotary embedding."""
    weight, factor = rope.get("mscale_all_dim", 0), rope.get("factor", 1)
    if rope["rope_type"] == "default" or not weight or factor <= 1:
        return 1.0
    return float((0.1 * weight * math.log(factor) + 1.0) ** 2)  # yarn_get_mscale, of queries and of keys


def _mlp(config: Any, index: int, *, bias: bool = False) -> MlpLayout:
    return parts.mlp(config, f"{parts.layer_name(index)}.mlp", int(config.intermediate_size), bias=bias)


def _experts_by_softmax(config: Any, index: int) -> MlpLayout | ExpertsLayout:
    """Return the experts of a DeepSeek-V2 layer, or the MLP of one of the first layers."""
    if config.mlp_bias:
        raise NotNative("its experts have biases")
    layout = experts_in_groups(config, index)
    if isinstance(layout, MlpLayout):
        return layout
    if config.topk_method not in ("greedy", "group_limited_greedy"):
        raise NotNative(f"its topk_method is {config.topk_method!r}, not 'greedy' or 'group_limited_greedy'")
    limited = config.topk_method == "group_limited_greedy"
    router = replace(
        layout.router,
        kind="softmax",
        normalize=False,  # transformers' class ignores norm_topk_prob
        correction=None,
        groups=int(config.n_group) if limited else 1,
        groups_kept=int(config.topk_group) if limited else 1,
        group_best=1 if limited else 2,
    )
    return replace(layout, router=router)
