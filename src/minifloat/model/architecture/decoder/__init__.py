"""What the native decoders compute for each family of models, decided from its config, without torch."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from minifloat.kernels.decoder_layout import DecoderLayout, NotNative
from minifloat.model.architecture.decoder import parts
from minifloat.model.architecture.decoder.features import why_not_on_device
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
