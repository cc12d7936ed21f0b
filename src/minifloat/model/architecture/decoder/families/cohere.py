"""Families with layer norms: Cohere with attention and MLP side by side, StarCoder 2, Nemotron, StableLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minifloat.kernels.decoder_layout import AttentionLayout, DecoderLayout, LayerLayout, NormLayout, NotNative
from minifloat.model.architecture.decoder import parts


def cohere(config: Any) -> DecoderLayout:
    """Return the layout of a Cohere: norms of heads with a weight for each head, in some models."""

    def layer(config: Any, index: int) -> LayerLayout:
        attention = _interleaved(config, index)
        if config.use_qk_norm:
            name, d = f"{parts.layer_name(index)}.self_attn", attention.head_dim
            eps = float(config.layer_norm_eps)
            attention = replace(
                attention,
                q_norm=NormLayout(f"{name}.q_norm.weight", (attention.heads, d), eps, centered=True),
                k_norm=NormLayout(f"{name}.k_norm.weight", (attention.kv_heads, d), eps, centered=True),
            )
        return _side_by_side(config, index, attention)

    return _decoder_of_cohere(config, layer)


def cohere2(config: Any) -> DecoderLayout:
    """Return the layout of a Cohere 2: layers with a window turn heads, the others do not."""

    def layer(config: Any, index: int) -> LayerLayout:
        attention, window = _interleaved(config, index), parts.sliding_window(config, index)
        rotary = attention.rotary if window is not None else None
        return _side_by_side(config, index, replace(attention, window=window, rotary=rotary))

    return _decoder_of_cohere(config, layer)


def starcoder2(config: Any) -> DecoderLayout:
    """Return the layout of a StarCoder 2: an MLP without a gate, one window for all layers."""

    def layer(config: Any, index: int) -> LayerLayout:
        bias, name = bool(config.use_bias), parts.layer_name(index)
        attention = parts.attention(config, index, bias=bias, out_bias=bias)
        return LayerLayout(
            name=name,
            input_norm=_layer_norm(config, f"{name}.input_layernorm", config.norm_epsilon),
            attention=replace(attention, window=config.sliding_window),
            mlp_norm=_layer_norm(config, f"{name}.post_attention_layernorm", config.norm_epsilon),
            mlp=parts.plain_mlp(config, f"{name}.mlp", ("c_fc", "c_proj"), bias=bias),
        )

    return parts.decoder(config, layer, _layer_norm(config, "model.norm", config.norm_epsilon))


def nemotron(config: Any) -> DecoderLayout:
    """Return the layout of a Nemotron: norms with weights beside one, squared ReLU without a gate."""

    def norm(name: str) -> NormLayout:
        return replace(_layer_norm(config, name, config.norm_eps), offset=1.0)

    def layer(config: Any, index: int) -> LayerLayout:
        bias, name = bool(config.attention_bias), parts.layer_name(index)
        attention = parts.attention(config, index, bias=bias, out_bias=bias)
        names = ("up_proj", "down_proj")
        return LayerLayout(
            name=name,
            input_norm=norm(f"{name}.input_layernorm"),
            attention=replace(attention, rotary=parts.rotary(config, attention.head_dim, partial=True)),
            mlp_norm=norm(f"{name}.post_attention_layernorm"),
            mlp=parts.plain_mlp(config, f"{name}.mlp", names, bias=bool(config.mlp_bias)),
        )

    return parts.decoder(config, layer, norm("model.norm"))


def stablelm(config: Any) -> DecoderLayout:
    if config.qk_layernorm:
        raise NotNative("each of its heads has a norm of its own (qk_layernorm)")

    def norm(name: str) -> NormLayout:
        return _layer_norm(config, name, config.layer_norm_eps)

    def layer(config: Any, index: int) -> LayerLayout:
        name, is_parallel = parts.layer_name(index), bool(config.use_parallel_residual)
        attention = parts.attention(config, index, bias=bool(config.use_qkv_bias))
        return LayerLayout(
            name=name,
            input_norm=norm(f"{name}.input_layernorm"),
            attention=replace(attention, rotary=parts.rotary(config, attention.head_dim, partial=True)),
            mlp_norm=None if is_parallel else norm(f"{name}.post_attention_layernorm"),
            mlp=parts.mlp(config, f"{name}.mlp", int(config.intermediate_size)),
            parallel=is_parallel,
        )

    return parts.decoder(config, layer, norm("model.norm"))


def _interleaved(config: Any, index: int) -> AttentionLayout:
    attention = parts.biased_attention(config, index)
    return replace(attention, rotary=parts.rotary(config, attention.head_dim, interleaved=True))


def _side_by_side(config: Any, index: int, attention: AttentionLayout) -> LayerLayout:
    name = parts.layer_name(index)
    norm = replace(_layer_norm(config, f"{name}.input_layernorm", config.layer_norm_eps), bias=None)
    mlp = parts.mlp(config, f"{name}.mlp", int(config.intermediate_size))
    return LayerLayout(name=name, input_norm=norm, attention=attention, mlp_norm=None, mlp=mlp, parallel=True)


def _decoder_of_cohere(config: Any, layer: Any) -> DecoderLayout:
    norm = replace(_layer_norm(config, "model.norm", config.layer_norm_eps), bias=None)
    return replace(parts.decoder(config, layer, norm), logits_factor=float(config.logit_scale))


def _layer_norm(config: Any, name: str, eps: float) -> NormLayout:
    size = (int(config.hidden_size),)
    return NormLayout(f"{name}.weight", size, float(eps), bias=f"{name}.bias", centered=True)
