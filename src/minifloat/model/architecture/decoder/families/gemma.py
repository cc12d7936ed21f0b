"""Gemma, Gemma 2 and 3: norms with weights beside one, GELU, a factor of the embedding, and caps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minifloat.kernels.decoder_layout import AttentionLayout, DecoderLayout, LayerLayout, NormLayout, NotNative
from minifloat.model.architecture.decoder import parts


def gemma(config: Any) -> DecoderLayout:
    def layer(config: Any, index: int) -> LayerLayout:
        attention, name = _attention(config, index), parts.layer_name(index)
        mlp = parts.mlp(config, f"{name}.mlp", int(config.intermediate_size))
        layout = parts.pre_norm_layer(config, index, attention, mlp)
        return replace(
            layout,
            input_norm=_norm(config, f"{name}.input_layernorm"),
            mlp_norm=_norm(config, f"{name}.post_attention_layernorm"),
        )

    return _decoder(config, layer)


def gemma2(config: Any) -> DecoderLayout:
    """Return the layout of a Gemma 2: norms on both sides, windows in some layers, caps of scores and logits."""

    def layer(config: Any, index: int) -> LayerLayout:
        attention = replace(
            _attention(config, index),
            scale=config.query_pre_attn_scalar**-0.5,
            window=parts.sliding_window(config, index),
            score_cap=config.attn_logit_softcapping,
        )
        return _sandwich(config, index, attention)

    return replace(_decoder(config, layer), logits_cap=config.final_logit_softcapping)


def gemma3(config: Any) -> DecoderLayout:
    """Return the layout of a Gemma 3's text model: norms of heads, and a rotary embedding for each type of layer."""

    def layer(config: Any, index: int) -> LayerLayout:
        attention, name, d = _attention(config, index), f"{parts.layer_name(index)}.self_attn", parts.head_size(config)
        attention = replace(
            attention,
            scale=config.query_pre_attn_scalar**-0.5,
            window=parts.sliding_window(config, index),
            rotary=parts.rotary(config, d, config.layer_types[index]),
            # attn_logit_softcapping is not read: transformers does not read it here
            q_norm=_norm(config, f"{name}.q_norm", d),
            k_norm=_norm(config, f"{name}.k_norm", d),
        )
        return _sandwich(config, index, attention)

    return replace(_decoder(config, layer), logits_cap=config.final_logit_softcapping)


def _attention(config: Any, index: int) -> AttentionLayout:
    if getattr(config, "use_bidirectional_attention", None):
        raise NotNative("its tokens see those after them (use_bidirectional_attention)")
    return parts.biased_attention(config, index)


def _sandwich(config: Any, index: int, attention: AttentionLayout) -> LayerLayout:
    name = parts.layer_name(index)
    return LayerLayout(
        name=name,
        input_norm=_norm(config, f"{name}.input_layernorm"),
        attention=attention,
        attention_norm=_norm(config, f"{name}.post_attention_layernorm"),
        mlp_norm=_norm(config, f"{name}.pre_feedforward_layernorm"),
        mlp=parts.mlp(config, f"{name}.mlp", int(config.intermediate_size)),
        result_norm=_norm(config, f"{name}.post_feedforward_layernorm"),
    )


def _norm(config: Any, name: str, size: int | None = None) -> NormLayout:
    return replace(parts.rms_norm(config, name, size), offset=1.0)


def _decoder(config: Any, layer: Any) -> DecoderLayout:
    return replace(
        parts.decoder(config, layer, _norm(config, "model.norm")),
        embedding_factor=float(config.hidden_size**0.5),
        rounds_embedding_factor=True,
    )
