"""OLMo 1 to 3 and EXAONE 4: norms without weights, norms behind attention and MLP, norms of q and k."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minifloat.kernels.decoder_layout import AttentionLayout, DecoderLayout, LayerLayout, NormLayout
from minifloat.model.architecture.decoder import parts


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
    bias = bool(config.attention_bias)
    return parts.attention(config, index, bias=bias, out_bias=bias)


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
