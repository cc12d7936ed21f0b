"""Configs of the models that the decoders run, read without transformers, whose import takes seconds.

transformers' classes fill in what a config.json leaves out, by rules of each class. Read here are files that state all
fields, in the form in which transformers saves it (`NativeType.stated`), those that the models of the hub have
(`published_config`), and of a few types files that leave out more (`ShortConfig`). Fields that no code of the type
reads are ignored. A file that says anything else (another field, a value of another type) is left to transformers,
which knows all rules and their errors; `read_config` then returns the reason. Tests compare with transformers' classes.

Source of names and defaults: transformers, ``configuration_<model_type>.py`` and ``modeling_rope_utils.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from minifloat.model.architecture.families import NATIVE
from minifloat.model.architecture.family import NativeType, ShortConfig
from minifloat.model.architecture.published_config import PUBLISHED, TIED, is_unread, stated_form
from minifloat.model.architecture.roles import has_towers

_LOG = logging.getLogger(__name__)
#: Fields of config.json that no decoder reads and that change no other field.
IGNORED = frozenset(
    {
        "architectures",
        "attention_dropout",
        "compression_config",
        "dtype",
        "initializer_range",
        "model_type",
        "name_or_path",
        "_name_or_path",
        "output_router_logits",
        "pretraining_tp",
        "quantization_config",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
#: Fields that no plan reads, of some types.
_UNREAD = IGNORED | {
    "_sliding_window_pattern",
    "embd_pdrop",
    "embedding_dropout",
    "experts_per_token",
    "hidden_dropout",
    "initial_context_length",
    "max_window_layers",
    "no_rope_layer_interval",
    "resid_pdrop",
    "residual_dropout",
    "sliding_window_pattern",
}
_ROPE = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
_WINDOWS = frozenset({"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"})
_FULL_ATTENTION = "full_attention"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
#: Fields of every config that may leave fields out: those that it has to state, and defaults of others.
_REQUIRED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "max_position_embeddings rms_norm_eps hidden_act"
)
_DEFAULTS = {"tie_word_embeddings": False, **dict.fromkeys(_TOKENS)}


class DecoderConfig(SimpleNamespace):
    """The fields of a config.json with the defaults of its model type, under transformers' names."""

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> DecoderConfig:
        """Return the config of the text model, as transformers' method of the same name does."""
        text: DecoderConfig = getattr(self, "text_config", self)
        return text


def read_config(values: Mapping[str, Any], folder: Path) -> DecoderConfig | str:
    """Return the config of a model, or why transformers has to read it."""
    config = read_short_config(values, folder)
    model_type = values.get("model_type")
    if not isinstance(config, str) or not isinstance(model_type, str):
        return config
    if has_towers(model_type):
        return _with_towers(values, folder)
    native = NATIVE.get(model_type)
    return _complete(values, native, folder) if native and native.stated else config


def _with_towers(values: Mapping[str, Any], folder: Path) -> DecoderConfig | str:
    nested = values.get("text_config")
    tied = values.get("tie_word_embeddings", TIED.get(values["model_type"]))
    if not isinstance(nested, Mapping) or not isinstance(tied, bool):
        return "text_config or tie_word_embeddings is missing"
    if nested.get("tie_word_embeddings", tied) != tied:
        return "its parts contradict each other in tie_word_embeddings"
    saved_by = values.get("transformers_version")
    text = read_config({"tie_word_embeddings": tied, "transformers_version": saved_by, **nested}, folder)
    if isinstance(text, str):
        return f"of its text_config {text}"
    return DecoderConfig(
        model_type=values["model_type"], name_or_path=str(folder), text_config=text, tie_word_embeddings=tied
    )


def _complete(values: Mapping[str, Any], native: NativeType, folder: Path) -> DecoderConfig | str:
    stated, newer = native.stated.split(), dict(native.newer)
    if native.model_type in PUBLISHED:
        values = stated_form(values, native)
    others = set(values) - _UNREAD - _ROPE - set(stated) - set(newer) - set(_TOKENS) - {"tie_word_embeddings"}
    reason = _unknown_fields(values, others)
    if reason:
        return reason
    values = newer | dict(values)
    names = [*stated, *newer, *_TOKENS, "tie_word_embeddings"]
    for name in names:
        if name not in values or not _check(name)(values[name], values):
            return f"{name} is missing or unusual"
    if values.get("use_sliding_window") is False and values["sliding_window"] is not None:
        return "it has a sliding window that it does not use"
    if "head_dim" not in stated and values["hidden_size"] % values["num_attention_heads"]:
        return "hidden_size is not a multiple of num_attention_heads"
    config = DecoderConfig(model_type=native.model_type, name_or_path=str(folder))
    for name in names:
        setattr(config, dict(native.renamed).get(name, name), values[name])
    if "per_layer_config" in stated:
        config.per_layer_config = _heads_of_layers(values)
    return _complete_rope(config, values, native) or config


def _unknown_fields(values: Mapping[str, Any], names: Collection[str]) -> str:
    """Log fields that nothing reads; return why transformers has to read the others."""
    read = sorted(name for name in names if not is_unread(name, values))
    if read:
        return f"it has the field {read[0]!r}"
    for name in sorted(names):
        _LOG.debug("config.json of a %s: the field %r is ignored, no code reads it", values["model_type"], name)
    return ""


def _heads_of_layers(values: Mapping[str, Any]) -> list[SimpleNamespace]:
    own = {int(index): fields for index, fields in values["per_layer_config"].items()}
    usual = {name: values[name] for name in ("head_dim", "num_key_value_heads")}
    return [SimpleNamespace(**usual | own.get(index, {})) for index in range(values["num_hidden_layers"])]


def _complete_rope(config: DecoderConfig, values: Mapping[str, Any], native: NativeType) -> str:
    """Set `rope_parameters`; return why transformers has to."""
    rope = values.get("rope_parameters")
    if values.get("rope_scaling") is not None or "rope_theta" in values:
        return "its rotary embedding is stated in an older form"
    embeddings = [rope]
    if native.rope == "by layer type" and isinstance(rope, dict):
        embeddings = list(rope.values())
        if set(rope) != set(config.layer_types):
            return "its rotary embeddings are not those of its types of layers"
    for embedding in embeddings:
        if not isinstance(embedding, dict) or not {"rope_theta", "rope_type"} <= set(embedding):
            return "its rotary embedding is not stated completely"
        if native.rope == "partial" and "partial_rotary_factor" not in embedding:
            return "it does not state which part of a head turns"
        if embedding["rope_type"] != "default" and not _has_context(embedding):
            return "its rotary embedding does not state the context of training"
    config.rope_parameters = rope
    return ""


def _has_context(embedding: Mapping[str, Any]) -> bool:
    needs = embedding["rope_type"] in ("yarn", "llama3", "longrope")
    return not needs or "original_max_position_embeddings" in embedding


def read_short_config(values: Mapping[str, Any], folder: Path) -> DecoderConfig | str:
    """Return the config of a model whose file leaves out fields, or why another function has to read it."""
    model_type = values.get("model_type")
    native = NATIVE.get(model_type) if isinstance(model_type, str) else None
    if native is None or native.short is None:
        known = ", ".join(name for name, entry in NATIVE.items() if entry.short is not None)
        return f"the model_type {model_type!r} is not one of {known}"
    short = native.short
    required, defaults = f"{_REQUIRED} {short.required}".split(), _DEFAULTS | dict(short.defaults)
    others = set(values) - IGNORED - _ROPE - _WINDOWS - set(required) - set(defaults)
    reason = _unknown_fields(values, others)
    if reason:
        return reason
    config = DecoderConfig(model_type=model_type, name_or_path=str(folder))
    for name in required:
        if name not in values or not _check(name)(values[name], values):
            return f"{name} is missing or unusual"
        setattr(config, name, values[name])
    for name, default in defaults.items():
        default = list(default) if isinstance(default, tuple) else default
        value = values.get(name, default)
        if value != default and not _check(name)(value, values):
            return f"{name} is unusual"
        setattr(config, name, value)
    if config.hidden_size % config.num_attention_heads:
        return "hidden_size is not a multiple of num_attention_heads"
    if "head_dim" in defaults and config.head_dim is None and model_type != "mixtral":
        config.head_dim = config.hidden_size // config.num_attention_heads
    if (getattr(config, "head_dim", None) or 2) % 2:
        return "head_dim is odd"
    return _short_windows(config, values, short) or _short_rope(config, values, short) or config


def _short_windows(config: DecoderConfig, values: Mapping[str, Any], short: ShortConfig) -> str:
    """Set the fields of sliding windows; return why transformers has to."""
    if short.windows == "stated":
        if "sliding_window" not in values or set(values) & (_WINDOWS - {"sliding_window"}):
            return "its sliding windows are not stated by sliding_window alone"
        if not _check("sliding_window")(values["sliding_window"], values):
            return "sliding_window is unusual"
        config.sliding_window = values["sliding_window"]
        return ""
    if short.windows == "none":
        return "it has sliding windows" if set(values) & _WINDOWS else ""
    if values.get("use_sliding_window", False) is not False:
        return "it uses sliding windows"
    config.sliding_window = short.no_window
    layers = [_FULL_ATTENTION] * config.num_hidden_layers
    if values.get("layer_types") not in (None, *([layers] if short.windows == "layers" else [])):
        return "layer_types is unusual"
    if short.windows == "layers":
        config.layer_types = layers
    return ""


def _short_rope(config: DecoderConfig, values: Mapping[str, Any], short: ShortConfig) -> str:
    """Set `rope_parameters`; return why transformers has to."""
    stated = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(stated, dict) or any(isinstance(value, dict) for value in stated.values()):
        return "its rotary embedding is stated per layer type"
    if "partial_rotary_factor" in stated:
        return "its rotary embedding is partial"
    rope = dict(stated)
    rope.setdefault("rope_theta", values.get("rope_theta", short.theta))
    rope.setdefault("rope_type", rope.get("type", "default"))
    if not _is_number(rope["rope_theta"], rope) or not _is_text(rope["rope_type"], rope):
        return "rope_theta or rope_type is unusual"
    if rope["rope_type"] in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    config.rope_parameters = rope
    return ""


_Check = Callable[[Any, Mapping[str, Any]], bool]


def _is_count(value: Any, values: Mapping[str, Any]) -> bool:
    return type(value) is int and value >= 1


def _is_natural(value: Any, values: Mapping[str, Any]) -> bool:
    return type(value) is int and value >= 0


def _is_count_or_none(value: Any, values: Mapping[str, Any]) -> bool:
    return value is None or _is_count(value, values)


def _is_number(value: Any, values: Mapping[str, Any]) -> bool:
    return type(value) in (int, float) and value > 0


def _is_number_or_none(value: Any, values: Mapping[str, Any]) -> bool:
    return value is None or _is_number(value, values)


def _is_flag(value: Any, values: Mapping[str, Any]) -> bool:
    return type(value) is bool


def _is_text(value: Any, values: Mapping[str, Any]) -> bool:
    return type(value) is str


def _is_head(value: Any, values: Mapping[str, Any]) -> bool:
    return _is_count(value, values) and value % 2 == 0


def _is_of_layers(value: Any, values: Mapping[str, Any]) -> bool:
    """Return whether a value is the type of each layer; transformers changes the last one of a Gemma 4 to full."""
    if not isinstance(value, list) or len(value) != values.get("num_hidden_layers"):
        return False
    return values["model_type"] != "gemma4_text" or bool(value[-1] == "full_attention")


def _is_numbers(value: Any, values: Mapping[str, Any]) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _is_bidirectional(value: Any, values: Mapping[str, Any]) -> bool:
    return value in (None, False, "vision")


def _is_group_count(value: Any, values: Mapping[str, Any]) -> bool:
    no_groups = values["model_type"] == "deepseek_v2" and values.get("topk_method") == "greedy"
    return _is_count(value, values) or (value is None and no_groups)


def _is_experts_of_gemma4(value: Any, values: Mapping[str, Any]) -> bool:
    return _is_count(value, values) or (value is None and values.get("enable_moe_block") is False)


def _is_by_layer(value: Any, values: Mapping[str, Any]) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(index, str)
        and index.isdecimal()
        and isinstance(fields, Mapping)
        and set(fields) <= {"head_dim", "num_key_value_heads"}
        and all(_is_count(size, values) for size in fields.values())
        for index, fields in value.items()
    )


def is_tokens(value: Any, values: Mapping[str, Any] | None = None) -> bool:
    """Return whether a value of a config.json is None, a token or a list of tokens."""
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    return all(type(item) is int and item >= 0 for item in tokens)


_FLAGS = (
    "attention_bias attention_k_eq_v attention_out_bias enable_moe_block mlp_bias norm_topk_prob qk_layernorm qkv_bias "
    "rope_interleave tie_word_embeddings use_bias use_double_wide_mlp use_parallel_residual use_qk_norm use_qkv_bias "
    "use_sliding_window"
)
_NUMBERS = (
    "attention_multiplier embedding_multiplier layer_norm_eps logit_scale logits_scaling norm_eps norm_epsilon "
    "query_pre_attn_scalar residual_multiplier rms_norm_eps routed_scaling_factor swiglu_alpha swiglu_limit"
)
_NATURALS = (
    "first_k_dense_replace hidden_size_per_layer_input n_shared_experts num_kv_shared_layers num_nextn_predict_layers "
    "shared_intermediate_size"
)
#: Field -> check of its value; other fields are counts.
_CHECKS: dict[str, _Check] = {
    **dict.fromkeys(_FLAGS.split(), _is_flag),
    **dict.fromkeys(_NUMBERS.split(), _is_number),
    **dict.fromkeys(_NATURALS.split(), _is_natural),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"), _is_number_or_none),
    **dict.fromkeys(("hidden_act", "hidden_activation"), _is_text),
    **dict.fromkeys(("mlp_only_layers", "no_rope_layers"), _is_numbers),
    **dict.fromkeys(("moe_intermediate_size", "num_experts", "top_k_experts"), _is_experts_of_gemma4),
    **dict.fromkeys(_TOKENS, is_tokens),
    **dict.fromkeys(("n_group", "topk_group"), _is_group_count),
    "head_dim": _is_head,
    "q_lora_rank": _is_count_or_none,
    "topk_method": _is_text,
    "layer_types": _is_of_layers,
    "per_layer_config": _is_by_layer,
    "sliding_window": _is_count_or_none,
    "use_bidirectional_attention": _is_bidirectional,
}


def _check(name: str) -> _Check:
    return _CHECKS.get(name, _is_count)
