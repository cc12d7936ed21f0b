"""Mixtures of experts whose router is a softmax: Mixtral, Qwen, OLMoE, and gpt-oss with sinks and a clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minifloat.kernels.decoder_layout import (
    Activation,
    ExpertsLayout,
    LayerLayout,
    MlpLayout,
    NotNative,
    RouterLayout,
)
from minifloat.model.architecture.decoder import parts


def mixtral(config: Any, index: int) -> LayerLayout:
    attention = replace(parts.attention(config, index), window=config.sliding_window)
    name = f"{parts.layer_name(index)}.mlp"
    router = RouterLayout(f"{name}.gate.weight", top_k=int(config.num_experts_per_tok), normalize=True)
    experts = parts.experts(config, name, int(config.num_local_experts), int(config.intermediate_size), router)
    return parts.pre_norm_layer(config, index, attention, experts)


def qwen2_moe(config: Any, index: int) -> LayerLayout:
    """Return a layer of a Qwen 2 mixture: a shared expert behind a gate."""
    attention = parts.attention(config, index, bias=bool(config.qkv_bias))
    attention = replace(attention, window=parts.sliding_window(config, index))
    mlp = _qwen_mlp(config, index)
    if isinstance(mlp, ExpertsLayout):
        name = f"{parts.layer_name(index)}.mlp"
        shared = parts.mlp(config, f"{name}.shared_expert", int(config.shared_expert_intermediate_size))
        mlp = replace(mlp, shared=shared, shared_gate=f"{name}.shared_expert_gate.weight")
    return parts.pre_norm_layer(config, index, attention, mlp)


def qwen3_moe(config: Any, index: int) -> LayerLayout:
    """Return a layer of a Qwen 3 mixture: norms of heads."""
    bias, window = bool(config.attention_bias), config.sliding_window
    attention = parts.attention(config, index, bias=bias, out_bias=bias)
    attention = replace(attention, window=window, **parts.head_norms(config, index))
    return parts.pre_norm_layer(config, index, attention, _qwen_mlp(config, index))


def qwen3_vl_moe(config: Any, index: int) -> LayerLayout:
    """Return a layer of the text model of a Qwen3-VL mixture: weights of experts always sum to 1."""
    bias = bool(config.attention_bias)
    attention = parts.attention(config, index, bias=bias, out_bias=bias)
    attention = replace(attention, **parts.head_norms(config, index))
    mlp = _qwen_mlp(config, index)
    if isinstance(mlp, ExpertsLayout):
        mlp = replace(mlp, router=replace(mlp.router, normalize=True), either=True)
    return parts.pre_norm_layer(config, index, attention, mlp)


def olmoe(config: Any, index: int) -> LayerLayout:
    """Return a layer of an OLMoE: norms of q and k over all heads."""
    if config.clip_qkv is not None:
        raise NotNative("it clips q and k after their norms (clip_qkv)")
    bias = bool(config.attention_bias)
    attention = parts.attention(config, index, bias=bias, out_bias=bias)
    attention = replace(attention, **parts.whole_norms(config, index))
    name = f"{parts.layer_name(index)}.mlp"
    router = _qwen_router(config, name)
    experts = parts.experts(config, name, int(config.num_experts), int(config.intermediate_size), router)
    return parts.pre_norm_layer(config, index, attention, experts)


def gpt_oss(config: Any, index: int) -> LayerLayout:
    bias = bool(config.attention_bias)
    attention = parts.attention(config, index, bias=bias, out_bias=bias)
    attention = replace(
        attention,
        window=parts.sliding_window(config, index),
        sinks=f"{parts.layer_name(index)}.self_attn.sinks",
    )
    return parts.pre_norm_layer(config, index, attention, _clamped_experts(config, f"{parts.layer_name(index)}.mlp"))


def _qwen_mlp(config: Any, index: int) -> MlpLayout | ExpertsLayout:
    name = f"{parts.layer_name(index)}.mlp"
    is_sparse = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
    if not is_sparse or index in config.mlp_only_layers:
        return parts.mlp(config, name, int(config.intermediate_size))
    count, intermediate = int(config.num_experts), int(config.moe_intermediate_size)
    return parts.experts(config, name, count, intermediate, _qwen_router(config, name))


def _qwen_router(config: Any, name: str) -> RouterLayout:
    normalize = bool(getattr(config, "norm_topk_prob", False))
    return RouterLayout(f"{name}.gate.weight", top_k=int(config.num_experts_per_tok), normalize=normalize)


def _clamped_experts(config: Any, name: str) -> ExpertsLayout:
    top_k = int(config.num_experts_per_tok)
    return ExpertsLayout(
        router=RouterLayout(f"{name}.router.weight", top_k=top_k, kind="softmax_of_chosen", bias=f"{name}.router.bias"),
        gate_up=f"{name}.experts.gate_up_proj",
        down=f"{name}.experts.down_proj",
        count=int(config.num_local_experts),
        shape=(int(config.intermediate_size), int(config.hidden_size)),
        gate_up_bias=f"{name}.experts.gate_up_proj_bias",
        down_bias=f"{name}.experts.down_proj_bias",
        activation=Activation(
            "clamped_swiglu",
            alpha=float(getattr(config, "swiglu_alpha", 1.702)),  # transformers 5.10 has no field for these
            limit=float(getattr(config, "swiglu_limit", 7.0)),
        ),
        transposed=True,
        interleaved=True,
    )
