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
)
from minifloat.model.architecture.decoder import parts
from minifloat.model.architecture.decoder.families.glm import experts_in_groups

#: Epsilon of the norms of latents in transformers' classes, whatever the config says.
_LATENT_EPS = 1e-6


def deepseek_v2(config: Any, index: int) -> LayerLayout:
    """Return a layer of a DeepSeek-V2: experts by softmax; groups count as their best expert."""
    attention = _attention(config, index, interleaved=True)
    return parts.pre_norm_layer(config, index, attention, _experts_by_softmax(config, index))


def deepseek_v3(config: Any, index: int) -> LayerLayout:
    """Return a layer of a DeepSeek-V3 or R1, or of a Kimi-K2: experts by sigmoid, in groups."""
    attention = _attention(config, index, interleaved=bool(config.rope_interleave))
    return parts.pre_norm_layer(config, index, attention, experts_in_groups(config, index))


def glm4_moe_lite(config: Any, index: int) -> LayerLayout:
    """Return a layer of a GLM-4.7-Flash: as DeepSeek-V3, with a list of the layers that have experts."""
    attention = _attention(config, index, interleaved=bool(config.rope_interleave))
    dense = config.mlp_layer_types[index] != "sparse"
    return parts.pre_norm_layer(config, index, attention, experts_in_groups(config, index, dense=dense))


def youtu(config: Any, index: int) -> LayerLayout:
    """Return a layer of a Youtu-LLM: latent attention without experts."""
    attention = _attention(config, index, interleaved=bool(config.rope_interleave))
    return parts.pre_norm_layer(config, index, attention, _mlp(config, index))


def minicpm3(config: Any) -> DecoderLayout:
    """Return the layout of a MiniCPM3: no pairs of neighbours turn; embeddings, results and logits have factors."""

    def layer(config: Any, index: int) -> LayerLayout:
        attention = _attention(config, index, interleaved=False)
        layer = parts.pre_norm_layer(config, index, attention, _mlp(config, index, bias=bool(config.mlp_bias)))
        return replace(layer, residual_factor=config.scale_depth / math.sqrt(config.num_hidden_layers))

    return replace(
        parts.decoder(config, layer),
        embedding_factor=float(config.scale_emb),
        rounds_embedding_factor=True,
        logits_factor=config.dim_model_base / config.hidden_size,
    )


def _attention(config: Any, index: int, *, interleaved: bool) -> AttentionLayout:
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
