"""Llama, and the families that differ from it in biases, norms of heads, windows and rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minifloat.kernels.decoder_layout import (
    AttentionLayout,
    DecoderLayout,
    ExpertsLayout,
    LayerLayout,
    MlpLayout,
    NormLayout,
    RouterLayout,
)
from minifloat.model.architecture.decoder import parts


def llama(config: Any, index: int) -> LayerLayout:
    attention = parts.biased_attention(config, index)
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
    attention = parts.biased_attention(config, index)
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
    attention = parts.biased_attention(config, index)
    window = parts.sliding_window(config, index) if config.use_sliding_window else None
    turned = attention.rotary if config.no_rope_layers[index] else None
    attention = replace(attention, rotary=turned, window=window)
    return parts.pre_norm_layer(config, index, attention, dense_mlp(config, index, bias=bool(config.mlp_bias)))


def arcee(config: Any, index: int) -> LayerLayout:
    """Return a layer of an Arcee: an MLP without a gate."""
    attention = parts.biased_attention(config, index)
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


def olmo(config: Any) -> DecoderLayout:
    """Return the layout of an OLMo: layer norms without weights, and q, k and v clipped in some models."""
    norm = NormLayout(None, (int(config.hidden_size),), 1e-5, centered=True)

    def layer(config: Any, index: int) -> LayerLayout:
        attention, name = replace(_attention(config, index), clip=config.clip_qkv), parts.layer_name(index)
        mlp = parts.mlp(config, f"{name}.mlp", int(config.intermediate_size))
        return LayerLayout(name=name, input_norm=norm, attention=attention, mlp_norm=norm, mlp=mlp)

    return parts.decoder(config, layer, norm)


def olmo2(config: Any, index: int) -> LayerLayout:
    """Return a layer of an OLMo 2: norms of results, and of q and k over all heads."""
    attention = replace(_attention(config, index), **parts.whole_norms(config, index))
    return _post_norm_layer(config, index, attention)


def olmo3(config: Any, index: int) -> LayerLayout:
    """Return a layer of an OLMo 3: windows in some layers, and a rotary embedding for each type of layer."""
    attention = replace(
        _attention(config, index),
        window=parts.sliding_window(config, index),
        rotary=parts.rotary(config, parts.head_size(config), config.layer_types[index]),
        **parts.whole_norms(config, index),
    )
    return _post_norm_layer(config, index, attention)


def exaone4(config: Any, index: int) -> LayerLayout:
    """Return a layer of an EXAONE 4: in models with windows, layers without a window have no rotary embedding."""
    attention = parts.attention(config, index)
    is_sliding = config.layer_types[index] == "sliding_attention"
    attention = replace(
        attention,
        window=parts.sliding_window(config, index),
        rotary=attention.rotary if config.sliding_window is None or is_sliding else None,
        **parts.head_norms(config, index),
    )
    return _post_norm_layer(config, index, attention)


def _attention(config: Any, index: int) -> AttentionLayout:
    return parts.biased_attention(config, index)


def _post_norm_layer(config: Any, index: int, attention: AttentionLayout) -> LayerLayout:
    name = parts.layer_name(index)
    return LayerLayout(
        name=name,
        input_norm=None,
        attention=attention,
        attention_norm=parts.rms_norm(config, f"{name}.post_attention_layernorm"),
        mlp_norm=None,
        mlp=parts.mlp(config, f"{name}.mlp", int(config.intermediate_size)),
        result_norm=parts.rms_norm(config, f"{name}.post_feedforward_layernorm"),
    )


def granite(config: Any) -> DecoderLayout:
    def mlp(config: Any, index: int) -> MlpLayout:
        name, bias = f"{parts.layer_name(index)}.mlp", bool(config.mlp_bias)
        return parts.mlp(config, name, int(config.intermediate_size), bias=bias)

    return _decoder(config, mlp)


def granite_moe(config: Any) -> DecoderLayout:
    """Return the layout of a Granite mixture: softmax over the chosen experts, and in some an MLP beside them."""
    layout = _decoder(config, _experts)
    renamings = (
        (r"\.block_sparse_moe\.input_linear\.weight$", ".block_sparse_moe.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".block_sparse_moe.experts.down_proj"),
        (r"\.block_sparse_moe\.router\.layer\.", ".block_sparse_moe.router."),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    )
    return replace(layout, renamings=renamings)


def _experts(config: Any, index: int) -> ExpertsLayout:
    name = f"{parts.layer_name(index)}.block_sparse_moe"
    router = RouterLayout(f"{name}.router.weight", top_k=int(config.num_experts_per_tok), kind="softmax_of_chosen")
    layout = parts.experts(config, name, int(config.num_local_experts), int(config.intermediate_size), router)
    shared = int(getattr(config, "shared_intermediate_size", 0))
    if not shared:
        return layout
    names = ("input_linear", "output_linear")
    return replace(layout, shared=parts.fused_mlp(config, f"{parts.layer_name(index)}.shared_mlp", shared, names))


def _decoder(config: Any, mlp: Callable[[Any, int], MlpLayout | ExpertsLayout]) -> DecoderLayout:
    def layer(config: Any, index: int) -> LayerLayout:
        attention = parts.biased_attention(config, index)
        attention = replace(attention, scale=float(config.attention_multiplier))
        layout = parts.pre_norm_layer(config, index, attention, mlp(config, index))
        return replace(layout, residual_factor=float(config.residual_multiplier))

    return replace(
        parts.decoder(config, layer),
        embedding_factor=float(config.embedding_multiplier),
        logits_factor=1.0 / config.logits_scaling,
    )
