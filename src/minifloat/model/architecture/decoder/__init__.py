"""What the native decoders compute for each family of models, and what that of GPUs lacks; no torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from minifloat.kernels.decoder_layout import (
    Activation,
    AttentionLayout,
    DecoderLayout,
    DeltaLayout,
    LayerLayout,
    MlpLayout,
    NormLayout,
    NotNative,
)
from minifloat.model.architecture.decoder import parts
from minifloat.model.architecture.families import NATIVE
from minifloat.model.architecture.family import NativeType

__all__ = [
    "NATIVE",
    "DecoderLayout",
    "NotNative",
    "decoder_layout",
    "why_not_on_device",
    "why_not_type",
]

#: Fields of configs that the layouts of all families obey, or that change no result.
_COMMON = (
    "attention_bias attention_dropout bos_token_id embd_pdrop embedding_dropout eos_token_id head_dim hidden_act "
    "hidden_activation hidden_dropout hidden_size initializer_range intermediate_size layer_types "
    "max_position_embeddings max_window_layers mlp_bias no_rope_layer_interval num_attention_heads "
    "num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts num_mtp_layers "
    "output_router_logits pad_token_id pretraining_tp resid_pdrop residual_dropout rms_norm_eps rope_parameters "
    "router_aux_loss_coef router_jitter_noise sliding_window sliding_window_pattern tie_word_embeddings use_cache "
    "use_sliding_window vocab_size"
)


def _unknown_field(native: NativeType, config: Any) -> str:
    """Return a field of a newer transformers that is not at its default and that the layout ignores; empty if none."""
    known = {*_COMMON.split(), *native.fields}
    own = getattr(type(config), "__dataclass_fields__", {})
    inherited = {name for base in type(config).__mro__[1:] for name in _base_fields(base)}
    for name, field in own.items():
        if name not in known | inherited and getattr(config, name, field.default) != field.default:
            return str(name)
    return ""


def _base_fields(base: type) -> tuple[str, ...]:
    """Return the fields of transformers' base class of all configs; those of other classes are a family's own."""
    return tuple(getattr(base, "__dataclass_fields__", ())) if base.__name__ == "PreTrainedConfig" else ()


def why_not_type(model_type: str) -> str:
    """Return why no decoder supports the ``model_type`` of a text model; empty if that of CPUs does."""
    return "" if model_type in NATIVE else f"its model_type is {model_type!r}, not one of {', '.join(NATIVE)}"


def decoder_layout(config: Any) -> DecoderLayout:
    reason = why_not_type(config.model_type)
    if reason:
        raise NotNative(reason)
    native = NATIVE[config.model_type]
    field = _unknown_field(native, config)
    if field:
        raise NotNative(f"its config sets {field!r}, which minifloat does not know")
    if native.decoder:
        layout: DecoderLayout = _function(native.decoder)(config)
        return layout
    layout = parts.decoder(config, _function(native.layer))
    return replace(layout, renamings=parts.W1_W2_W3) if native.w1_w2_w3 else layout


def _function(name: str) -> Any:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"minifloat.model.architecture.decoder.families.{module}"), function)


def why_not_on_device(layout: DecoderLayout) -> str:
    """Return why the decoder of GPUs does not run a model; empty if it does."""
    missing = next(_missing(layout), "")
    return f"the decoder of GPUs does not have {missing}" if missing else ""


def _missing(layout: DecoderLayout) -> Iterator[str]:
    if layout.inputs is not None:
        yield "inputs of layers besides the residual stream"
    if layout.embedding_factor != 1.0 or layout.logits_factor != 1.0 or layout.logits_cap is not None:
        yield "factors and caps of embeddings and logits"
    if any(isinstance(layer.attention, DeltaLayout) for layer in layout.layers):
        yield "layers with a gated delta rule"
        return
    attentions = [layer.attention for layer in layout.layers if isinstance(layer.attention, AttentionLayout)]
    for layer, attention in zip(layout.layers, attentions, strict=True):
        yield from _missing_in_layer(layer, layout.norm)
        yield from _missing_in_attention(attention, attentions[0], layout.norm.eps)


def _missing_in_layer(layer: LayerLayout, last: NormLayout) -> Iterator[str]:
    if layer.parallel:
        yield "attention and MLP side by side"
    if layer.residual_factor != 1.0 or layer.scalar is not None:
        yield "factors of the results of layers, or of the residual stream"
    if layer.attention_norm is not None or layer.result_norm is not None:
        yield "norms behind attention and MLP"
    for norm in (layer.input_norm, layer.mlp_norm, last):
        if norm is None or not _is_plain(norm, last.eps):
            yield "norms other than RMS norms before attention and MLP"
    if not isinstance(layer.mlp, MlpLayout):
        yield "mixtures of experts"
    elif layer.mlp.activation != Activation():
        yield f"the activation {layer.mlp.activation.name!r}"


def _missing_in_attention(attention: AttentionLayout, first: AttentionLayout, eps: float) -> Iterator[str]:
    if attention.latent is not None:
        yield "latent attention"
    if attention.values != "own" or attention.v_norm is not None:
        yield "keys that are values, or shared by layers, or norms of values"
    if attention.rotary is None or attention.rotary != first.rotary:
        yield "layers with different rotary embeddings, or without one"
    elif attention.rotary.interleaved:
        yield "rotary embeddings of neighbouring dimensions"
    if (attention.kv_heads, attention.head_dim, attention.scale) != (first.kv_heads, first.head_dim, first.scale):
        yield "layers with heads of different sizes"
    norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    if attention.whole_norms or any(not _is_plain(norm, eps) or len(norm.shape) != 1 for norm in norms):
        yield "norms over all heads, or with a weight for each"
    if attention.gated:
        yield "gates of the results of attention"
    extras = {"sinks": attention.sinks, "caps of scores": attention.score_cap, "clipped heads": attention.clip}
    yield from (name for name, value in extras.items() if value is not None)


def _is_plain(norm: NormLayout, eps: float) -> bool:
    """Return whether a norm is an RMS norm with a weight and an epsilon."""
    changed = norm.centered or norm.offset or norm.factor != 1.0
    return norm.weight is not None and norm.bias is None and not changed and norm.eps == eps
