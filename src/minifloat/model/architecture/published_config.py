"""Configs as the models of the hub have them: what they leave out, state in an older form, or say for other programs.

`stated_form` brings a config.json to the form in which transformers 5 saves it: with the defaults of the class, a type
for each layer, and one description of the rotary embedding (`rope_parameters`). `is_unread` knows the fields that no
code of transformers reads: authors leave there what belongs to their training or to other programs, as
``is_llama_config`` or ``transformers.js_config``. Tests derive what is read from the code of each type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minifloat.model.architecture.family import NativeType


@dataclass(frozen=True)
class PublishedConfig:
    """What files on the hub leave out of the fields that a type has to state."""

    defaults: dict[str, Any]  #: of transformers' class
    theta: float = 10_000.0
    turns: float | None = None  #: part of a head that turns
    most: str = ""  #: type of most layers, where the types are left out; each n-th has full attention
    every: int = 1
    every_field: str = ""  #: the field that states n
    rotations: tuple[str, ...] = ()  #: types of rotary embeddings that the class takes; none: all
    computed: tuple[str, ...] = ()  #: fields that the class computes, whatever the file says


def _tokens(bos: int | None, eos: int | None, pad: int | None) -> dict[str, Any]:
    return {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}


_UNTIED, _TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
_NO_BIAS = {"attention_bias": False}
_BASE = _tokens(None, None, None) | _UNTIED
_GEMMA = {
    **_tokens(2, 1, 0),
    **_TIED,
    **_NO_BIAS,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
}
_GEMMA2 = {
    **_GEMMA,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "use_bidirectional_attention": None,
}
_GEMMA3 = {
    **_GEMMA2,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "use_bidirectional_attention": False,
    "vocab_size": 262_208,
}
_GEMMA4 = {
    **_GEMMA,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "moe_intermediate_size": None,
    "num_experts": None,
    "top_k_experts": None,
    "use_double_wide_mlp": False,
}
_HEADS_OF_LATENTS = ("head_dim", "qk_head_dim")
_QWEN3_5 = PublishedConfig(_BASE, turns=0.25, most="linear_attention", every=4, every_field="full_attention_interval")
#: ``model_type`` -> what its files leave out; the types without a row are read only as transformers 5 saves them.
PUBLISHED = {
    "gemma2": PublishedConfig(_GEMMA2, most="sliding_attention", every=2),
    "gemma3_text": PublishedConfig(
        _GEMMA3, 1_000_000.0, most="sliding_attention", every=6, every_field="sliding_window_pattern"
    ),
    "gemma4_text": PublishedConfig(_GEMMA4),
    "granite": PublishedConfig(_tokens(1, 2, None) | _UNTIED | _NO_BIAS | {"mlp_bias": False}),
    "glm": PublishedConfig(_UNTIED | {"bos_token_id": None, "attention_bias": True}, turns=0.5),
    "glm4": PublishedConfig(_UNTIED | {"bos_token_id": None, "attention_bias": True}, turns=0.5),
    "glm4_moe": PublishedConfig(_BASE | _NO_BIAS, turns=0.5),
    "olmo2": PublishedConfig(_tokens(None, 50_279, 1) | _UNTIED | _NO_BIAS),
    "phi3": PublishedConfig(
        _tokens(1, 32_000, 32_000) | _UNTIED | {"original_max_position_embeddings": 4096, "sliding_window": None},
        turns=1.0,
        rotations=("default", "longrope"),
    ),
    "cohere": PublishedConfig(_tokens(5, 255_001, 0) | _TIED | _NO_BIAS | {"use_qk_norm": False}, 500_000.0),
    "smollm3": PublishedConfig(
        {
            **_tokens(128_000, 128_001, 128_004),
            **_TIED,
            **_NO_BIAS,
            "mlp_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
        },
        2_000_000.0,
    ),
    "gpt_oss": PublishedConfig(_BASE | {"attention_bias": True}, 150_000.0, most="sliding_attention", every=2),
    "deepseek_v2": PublishedConfig(
        _tokens(1, 2, None) | _UNTIED | _NO_BIAS | {"mlp_bias": False}, computed=_HEADS_OF_LATENTS
    ),
    "deepseek_v3": PublishedConfig(
        _tokens(0, 1, None) | _UNTIED | _NO_BIAS | {"rope_interleave": True, "num_nextn_predict_layers": 1},
        computed=_HEADS_OF_LATENTS,
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
}
#: ``model_type`` of a model around a text model -> default of `tie_word_embeddings` in its class.
TIED = {"gemma3": True, "gemma4": True, "mistral3": True, "qwen3_5": False, "qwen3_5_moe": False}

_FULL = "full_attention"
#: Base of the rotary embedding in layers with a sliding window, where it is stated for each type of layer.
_LOCAL_THETA = 10_000.0
#: Size of the heads of Gemma 4's layers with full attention.
_GLOBAL_HEAD = 512


def stated_form(values: Mapping[str, Any], native: NativeType) -> dict[str, Any]:
    """Return a config as transformers 5 saves it; what cannot be brought to that form stays as it is."""
    published = PUBLISHED[native.model_type]
    given = published.defaults | {name: value for name, value in values.items() if name not in published.computed}
    fields, layers = native.stated.split(), given.get("num_hidden_layers")
    if type(layers) is int and 0 < layers < _MOST_LAYERS:
        if "no_rope_layers" in fields:
            _state_turning_layers(given, layers)
        if "layer_types" in fields and given.get("layer_types") is None and published.most:
            every = given.get(published.every_field, published.every)
            if type(every) is int and every > 0:
                given["layer_types"] = [_FULL if (n + 1) % every == 0 else published.most for n in range(layers)]
    given.pop(published.every_field, None)
    if "per_layer_config" in fields:
        _state_global_heads(given)
    if native.rope == "by layer type":
        _state_rope_by_type(given, published)
    else:
        _state_rope(given, published)
    return given


#: No config of a real model has as many; a list of more is not made for a hostile one.
_MOST_LAYERS = 10_000


def _state_turning_layers(given: dict[str, Any], layers: int) -> None:
    """State which layers of a SmolLM3 have a rotary embedding, and their types where none has a sliding window."""
    every = given.get("no_rope_layer_interval", 4)
    if given.get("no_rope_layers") is None and type(every) is int and every > 0:
        given["no_rope_layers"] = [int((index + 1) % every != 0) for index in range(layers)]
    if given.get("layer_types") is None and given["use_sliding_window"] is False:
        given["layer_types"] = [_FULL] * layers


def _state_global_heads(given: dict[str, Any]) -> None:
    """State the sizes of the heads of Gemma 4's layers with full attention."""
    size = given.pop("global_head_dim", _GLOBAL_HEAD)
    heads = given.pop("num_global_key_value_heads", None)
    types = given.get("layer_types")
    if "per_layer_config" in given or not isinstance(types, list):
        return
    sizes = {"head_dim": size}
    if heads is not None and given["attention_k_eq_v"]:
        sizes["num_key_value_heads"] = heads
    given["per_layer_config"] = {str(index): dict(sizes) for index, kind in enumerate(types) if kind == _FULL}


def _state_rope(given: dict[str, Any], published: PublishedConfig) -> None:
    """Gather the fields of the rotary embedding in `rope_parameters`."""
    stated = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if not isinstance(stated, dict) or any(isinstance(value, dict) for value in stated.values()):
        return
    rope = dict(stated)
    rope.setdefault("rope_type", rope.get("type", "default"))
    if published.rotations and rope["rope_type"] not in published.rotations:
        return
    rope.setdefault("rope_theta", given.get("rope_theta", published.theta))
    if published.turns is not None:
        rope.setdefault("partial_rotary_factor", given.pop("partial_rotary_factor", published.turns))
        given.pop("partial_rotary_factor", None)
    own_context = given.get("original_max_position_embeddings")
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        if own_context is not None:
            rope["original_max_position_embeddings"] = own_context
        else:
            rope.setdefault("original_max_position_embeddings", given.get("max_position_embeddings"))
    for name in ("rope_scaling", "rope_theta"):
        given.pop(name, None)
    given["rope_parameters"] = rope


def _state_rope_by_type(given: dict[str, Any], published: PublishedConfig) -> None:
    """State the rotary embedding of each type of layer, as Gemma 3's class does; Gemma 4's files state it."""
    ropes, scaling = given.get("rope_parameters"), given.get("rope_scaling")
    if ropes is None and "per_layer_config" not in given:
        ropes = {"sliding_attention": {"rope_type": "default"}, _FULL: {"rope_type": "default"}}
    if not isinstance(ropes, dict) or not all(isinstance(rope, dict) for rope in ropes.values()):
        return
    if not (scaling is None or (isinstance(scaling, dict) and "per_layer_config" not in given)):
        return
    ropes = {kind: dict(rope) for kind, rope in ropes.items()}
    for kind, name, default in (
        (_FULL, "rope_theta", published.theta),
        ("sliding_attention", "rope_local_base_freq", _LOCAL_THETA),
    ):
        if kind in ropes:
            ropes[kind].update(scaling or {} if kind == _FULL else {})
            ropes[kind].setdefault("rope_theta", given.get(name, default))
            ropes[kind].setdefault("rope_type", ropes[kind].get("type", "default"))
    for name in ("rope_scaling", "rope_theta", "rope_local_base_freq"):
        given.pop(name, None)
    given["rope_parameters"] = ropes


#: The release of transformers whose code `READ` was derived from; later code may read what a later file states.
_TRANSFORMERS = (5, 23)
#: Fields that transformers' text models, their classes of configs, caches or masks read, and that not every type here
#: obeys.
READ = frozenset(
    {
        *("add_cross_attention", "attention_chunk_size", "chunk_size_feed_forward", "full_attention_interval"),
        *("global_head_dim", "head_dim", "is_causal", "is_decoder", "is_encoder_decoder", "kv_sharing_modes"),
        *("layer_types", "num_experts", "num_global_key_value_heads"),
        *("num_kv_shared_layers", "num_local_experts", "num_mtp_layers", "num_nextn_predict_layers"),
        *("number_of_conv_states", "partial_rotary_factor", "per_layer_config", "rope_local_base_freq"),
        *("rotary_dim", "sliding_window", "text_config", "use_sliding_window"),
    }
)
#: Values of fields that mean what leaving them out does.
_NEUTRAL = {
    "add_cross_attention": False,
    "attention_chunk_size": None,
    "chunk_size_feed_forward": 0,
    "is_decoder": False,
    "is_encoder_decoder": False,
}


def is_unread(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether no code of transformers reads a field that the type does not have."""
    if name in _NEUTRAL and values[name] == _NEUTRAL[name]:
        return True
    return name not in READ and _saved_by(values) <= _TRANSFORMERS


def _saved_by(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the release of transformers that saved a config; (0, 0) where it does not say."""
    numbers = re.match(r"(\d{1,6})\.(\d{1,6})", str(values.get("transformers_version", "")))
    return (0, 0) if numbers is None else tuple(map(int, numbers.groups()))
