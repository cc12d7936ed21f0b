"""Llama, and the families that differ from it in biases, norms of heads, windows and rotary embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minifloat.kernels.decoder_layout import LayerLayout
from minifloat.model.architecture.decoder import parts


def llama(config: Any, index: int) -> LayerLayout:
    bias = bool(config.attention_bias)
    attention = parts.attention(config, index, bias=bias, out_bias=bias)
    return parts.pre_norm_layer(config, index, attention, dense_mlp(config, index, bias=bool(config.mlp_bias)))


def mistral(config: Any, index: int) -> LayerLayout:
    """Return a layer of a Mistral: one window for all layers."""
    attention = replace(parts.attention(config, index), window=config.sliding_window)
    return parts.pre_norm_layer(config, index, attention, dense_mlp(config, index))


def ministral(config: Any, index: int) -> LayerLayout:
    """Return a layer of a Ministral: windows in some layers."""
    attention = replace(parts.attention(config, index), window=parts.sliding_window(config, index))
    return parts.pre_norm_layer(config, index, attention, dense_mlp(config, index))


def qwen2(config: Any, index: int) -> LayerLayout:
    """Return a layer of a Qwen 2, or of the text model of a Qwen2-VL or 2.5-VL: biases of q, k and v."""
    attention = parts.attention(config, index, bias=True)
    attention = replace(attention, window=parts.sliding_window(config, index))
    return parts.pre_norm_layer(config, index, attention, dense_mlp(config, index))


def qwen3(config: Any, index: int) -> LayerLayout:
    """Return a layer of a Qwen 3, or of the text model of a Qwen3-VL: norms of heads, windows in some layers."""
    bias = bool(config.attention_bias)
    attention = parts.attention(config, index, bias=bias, out_bias=bias)
    window = parts.sliding_window(config, index) if hasattr(config, "layer_types") else None
    attention = replace(attention, window=window, **parts.head_norms(config, index))
    return parts.pre_norm_layer(config, index, attention, dense_mlp(config, index))


def seed_oss(config: Any, index: int) -> LayerLayout:
    """Return a layer of a Seed-OSS: biases of q, k and v, and of the result of attention, apart."""
    bias, out_bias = bool(config.attention_bias), bool(config.attention_out_bias)
    attention = parts.attention(config, index, bias=bias, out_bias=out_bias)
    return parts.pre_norm_layer(config, index, attention, dense_mlp(config, index, bias=bool(config.mlp_bias)))


def smollm3(config: Any, index: int) -> LayerLayout:
    """Return a layer of a SmolLM 3: some layers without rotary embedding, some of these with a window."""
    bias = bool(config.attention_bias)
    attention = parts.attention(config, index, bias=bias, out_bias=bias)
    window = parts.sliding_window(config, index) if config.use_sliding_window else None
    turned = attention.rotary if config.no_rope_layers[index] else None
    attention = replace(attention, rotary=turned, window=window)
    return parts.pre_norm_layer(config, index, attention, dense_mlp(config, index, bias=bool(config.mlp_bias)))


def arcee(config: Any, index: int) -> LayerLayout:
    """Return a layer of an Arcee: an MLP without a gate."""
    bias = bool(config.attention_bias)
    attention = parts.attention(config, index, bias=bias, out_bias=bias)
    name = f"{parts.layer_name(index)}.mlp"
    mlp = parts.plain_mlp(config, name, ("up_proj", "down_proj"), bias=bool(config.mlp_bias))
    return parts.pre_norm_layer(config, index, attention, mlp)


def helium(config: Any, index: int) -> LayerLayout:
    """Return a layer of a Helium: neighbouring dimensions of a head turn together."""
    attention = parts.attention(config, index, bias=bool(config.attention_bias))
    attention = replace(attention, rotary=parts.rotary(config, attention.head_dim, interleaved=True))
    return parts.pre_norm_layer(config, index, attention, dense_mlp(config, index, bias=bool(config.mlp_bias)))


def ernie(config: Any, index: int) -> LayerLayout:
    """Return a layer of a dense ERNIE 4.5: as Helium, with biases everywhere or nowhere."""
    bias = bool(config.use_bias)
    attention = parts.attention(config, index, bias=bias, out_bias=bias)
    attention = replace(attention, rotary=parts.rotary(config, attention.head_dim, interleaved=True))
    name = f"{parts.layer_name(index)}.mlp"
    return parts.pre_norm_layer(
        config, index, attention, parts.mlp(config, name, int(config.intermediate_size), bias=bias)
    )


def dense_mlp(config: Any, index: int, *, bias: bool = False) -> Any:
    return parts.mlp(config, f"{parts.layer_name(index)}.mlp", int(config.intermediate_size), bias=bias)
