"""Configs that state every field, read without transformers: those that transformers 5 saves.

transformers' classes fill in what a config.json leaves out, by rules of each class. A file that states all fields, in
the form in which transformers saves them, leaves nothing to these rules. `read_config` reads such files of all families
that the decoders run, and those of `decoder_config.py`, which may leave out more; all others it leaves to transformers.
tests/architecture/test_complete_config.py compares with transformers' classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from minifloat.model.architecture.decoder_config import IGNORED, DecoderConfig, is_tokens, read_decoder_config
from minifloat.model.architecture.multimodal import has_towers

_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "max_position_embeddings"
)
_ACTIVATION = f"{_SIZES} hidden_act rms_norm_eps"
_GEMMA = f"{_SIZES} attention_bias head_dim hidden_activation layer_types rms_norm_eps sliding_window"
_EXPERTS = "moe_intermediate_size num_experts num_experts_per_tok"
_LOCAL_EXPERTS = "num_local_experts num_experts_per_tok"
_DELTA = (
    "attention_bias head_dim layer_types linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads "
    "linear_num_value_heads linear_value_head_dim"
)
_GRANITE = "attention_bias attention_multiplier embedding_multiplier logits_scaling residual_multiplier"
_GROUPED = (
    "attention_bias first_k_dense_replace head_dim moe_intermediate_size n_group n_routed_experts n_shared_experts "
    "norm_topk_prob num_experts_per_tok routed_scaling_factor topk_group"
)
_WINDOWS = "layer_types sliding_window"

#: ``model_type`` -> the fields that config.json must state, beside the rotary embedding and `_TOKENS`.
_STATED: dict[str, str] = {
    "ministral": f"{_ACTIVATION} {_WINDOWS} head_dim",
    "qwen2": f"{_ACTIVATION} {_WINDOWS} use_sliding_window",
    "qwen3": f"{_ACTIVATION} {_WINDOWS} use_sliding_window attention_bias head_dim",
    "seed_oss": f"{_ACTIVATION} attention_bias attention_out_bias head_dim mlp_bias",
    "smollm3": f"{_ACTIVATION} {_WINDOWS} use_sliding_window attention_bias mlp_bias no_rope_layers",
    "arcee": f"{_ACTIVATION} attention_bias head_dim mlp_bias",
    "helium": f"{_ACTIVATION} attention_bias head_dim mlp_bias",
    "ernie4_5": f"{_ACTIVATION} head_dim use_bias",
    "qwen3_moe": f"{_ACTIVATION} {_LOCAL_EXPERTS} attention_bias decoder_sparse_step mlp_only_layers "
    "moe_intermediate_size norm_topk_prob sliding_window use_sliding_window",
    "qwen3_next": f"{_ACTIVATION} {_DELTA} {_EXPERTS} decoder_sparse_step mlp_only_layers norm_topk_prob "
    "shared_expert_intermediate_size",
    "qwen3_5_text": f"{_ACTIVATION} {_DELTA}",
    "qwen3_5_moe_text": f"{_ACTIVATION} {_DELTA} {_EXPERTS} shared_expert_intermediate_size",
    "qwen2_vl_text": f"{_ACTIVATION} {_WINDOWS} use_sliding_window",
    "qwen2_5_vl_text": f"{_ACTIVATION} {_WINDOWS} use_sliding_window",
    "qwen3_vl_text": f"{_ACTIVATION} attention_bias head_dim",
    "qwen3_vl_moe_text": f"{_ACTIVATION} {_LOCAL_EXPERTS} attention_bias decoder_sparse_step head_dim mlp_only_layers "
    "moe_intermediate_size sliding_window",
    "olmoe": f"{_ACTIVATION} attention_bias clip_qkv norm_topk_prob num_experts num_experts_per_tok",
    "gpt_oss": f"{_ACTIVATION} {_LOCAL_EXPERTS} {_WINDOWS} attention_bias head_dim swiglu_limit",
    "gemma": f"{_ACTIVATION} attention_bias head_dim use_bidirectional_attention",
    "gemma2": f"{_GEMMA} attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar "
    "use_bidirectional_attention",
    "gemma3_text": f"{_GEMMA} attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar "
    "use_bidirectional_attention",
    "gemma4_text": f"{_GEMMA} attention_k_eq_v enable_moe_block final_logit_softcapping hidden_size_per_layer_input "
    "moe_intermediate_size num_experts num_kv_shared_layers per_layer_config top_k_experts use_bidirectional_attention "
    "use_double_wide_mlp vocab_size_per_layer_input",
    "phi3": f"{_ACTIVATION} original_max_position_embeddings sliding_window",
    "glm": f"{_ACTIVATION} attention_bias head_dim",
    "glm4": f"{_ACTIVATION} attention_bias head_dim",
    "glm4_moe": f"{_ACTIVATION} {_GROUPED} num_nextn_predict_layers use_qk_norm",
    "dots1": f"{_ACTIVATION} {_GROUPED} {_WINDOWS}",
    "minimax_m2": f"{_ACTIVATION} {_LOCAL_EXPERTS} head_dim",
    "granite": f"{_ACTIVATION} {_GRANITE} mlp_bias",
    "granitemoe": f"{_ACTIVATION} {_GRANITE} {_LOCAL_EXPERTS}",
    "granitemoeshared": f"{_ACTIVATION} {_GRANITE} {_LOCAL_EXPERTS} shared_intermediate_size",
    "olmo": f"{_SIZES} hidden_act attention_bias clip_qkv",
    "olmo2": f"{_ACTIVATION} attention_bias",
    "olmo3": f"{_ACTIVATION} {_WINDOWS} attention_bias",
    "exaone4": f"{_ACTIVATION} {_WINDOWS} head_dim",
    "cohere": f"{_SIZES} hidden_act attention_bias layer_norm_eps logit_scale use_qk_norm",
    "cohere2": f"{_SIZES} {_WINDOWS} hidden_act attention_bias head_dim layer_norm_eps logit_scale",
    "starcoder2": f"{_SIZES} hidden_act norm_epsilon sliding_window use_bias",
    "nemotron": f"{_SIZES} hidden_act attention_bias head_dim mlp_bias norm_eps",
    "stablelm": f"{_SIZES} hidden_act layer_norm_eps qk_layernorm use_parallel_residual use_qkv_bias",
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
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
_ROPE = {"rope_parameters", "rope_scaling", "rope_theta"}
#: Types whose rotary embedding has a default for the part of a head that it turns, which a file has to state.
_PARTIAL = {"glm", "glm4", "glm4_moe", "minimax_m2", "nemotron", "phi3", "qwen3_5_moe_text", "qwen3_5_text"}
_PARTIAL |= {"qwen3_next", "stablelm"}
#: Types with a rotary embedding for each type of layer.
_NESTED = {"gemma3_text", "gemma4_text", "olmo3"}
#: Fields that `minifloat.model.architecture.decoder` reads by another name.
_OTHER_NAMES = {name: {"num_local_experts": "num_experts"} for name in ("qwen3_moe", "qwen3_vl_moe_text")}
#: Fields that files before transformers 5.10 lack, and their defaults.
_NEWER = {"gpt_oss": {"swiglu_alpha": 1.702}}


def read_config(values: Mapping[str, Any], folder: Path) -> DecoderConfig | str:
    """Return the config of a model, or why transformers has to read it."""
    config = read_decoder_config(values, folder)
    model_type = values.get("model_type")
    if not isinstance(config, str) or not isinstance(model_type, str):
        return config
    if has_towers(model_type):
        return _with_towers(values, folder)
    return _complete(values, folder) if model_type in _STATED else config


def _with_towers(values: Mapping[str, Any], folder: Path) -> DecoderConfig | str:
    nested, tied = values.get("text_config"), values.get("tie_word_embeddings")
    if not isinstance(nested, Mapping) or not isinstance(tied, bool):
        return "text_config or tie_word_embeddings is missing"
    if nested.get("tie_word_embeddings", tied) != tied:
        return "its parts contradict each other in tie_word_embeddings"
    text = read_config({"tie_word_embeddings": tied, **nested}, folder)
    if isinstance(text, str):
        return f"of its text_config {text}"
    return DecoderConfig(
        model_type=values["model_type"], name_or_path=str(folder), text_config=text, tie_word_embeddings=tied
    )


def _complete(values: Mapping[str, Any], folder: Path) -> DecoderConfig | str:
    model_type = values["model_type"]
    stated, newer = _STATED[model_type].split(), _NEWER.get(model_type, {})
    others = set(values) - _UNREAD - _ROPE - set(stated) - set(newer) - set(_TOKENS) - {"tie_word_embeddings"}
    if others:
        return f"it has the field {min(others)!r}"
    values = newer | dict(values)
    for name in [*stated, *newer, *_TOKENS, "tie_word_embeddings"]:
        if name not in values or not _check(name)(values[name], values):
            return f"{name} is missing or unusual"
    if values.get("use_sliding_window") is False and values["sliding_window"] is not None:
        return "it has a sliding window that it does not use"
    if "head_dim" not in stated and values["hidden_size"] % values["num_attention_heads"]:
        return "hidden_size is not a multiple of num_attention_heads"
    config = DecoderConfig(model_type=model_type, name_or_path=str(folder))
    for name in [*stated, *newer, *_TOKENS, "tie_word_embeddings"]:
        setattr(config, _OTHER_NAMES.get(model_type, {}).get(name, name), values[name])
    if "per_layer_config" in stated:
        config.per_layer_config = _heads_of_layers(values)
    return _rope(config, values) or config


def _heads_of_layers(values: Mapping[str, Any]) -> list[SimpleNamespace]:
    """Return the sizes of heads of each layer."""
    own = {int(index): fields for index, fields in values["per_layer_config"].items()}
    usual = {name: values[name] for name in ("head_dim", "num_key_value_heads")}
    return [SimpleNamespace(**usual | own.get(index, {})) for index in range(values["num_hidden_layers"])]


def _rope(config: DecoderConfig, values: Mapping[str, Any]) -> str:
    """Set `rope_parameters`; return why transformers has to."""
    rope = values.get("rope_parameters")
    if config.model_type == "gpt_oss" and rope is None and isinstance(values.get("rope_scaling"), dict):
        rope = {"rope_theta": values.get("rope_theta"), **values["rope_scaling"]}  # as it was published
    elif values.get("rope_scaling") is not None or "rope_theta" in values:
        return "its rotary embedding is stated in an older form"
    embeddings = [rope]
    if config.model_type in _NESTED and isinstance(rope, dict):
        embeddings = list(rope.values())
        if set(rope) != set(config.layer_types):
            return "its rotary embeddings are not those of its types of layers"
    for embedding in embeddings:
        if not isinstance(embedding, dict) or not {"rope_theta", "rope_type"} <= set(embedding):
            return "its rotary embedding is not stated completely"
        if config.model_type in _PARTIAL and "partial_rotary_factor" not in embedding:
            return "it does not state which part of a head turns"
        if embedding["rope_type"] != "default" and not _has_context(embedding):
            return "its rotary embedding does not state the context of training"
    config.rope_parameters = rope
    return ""


def _has_context(embedding: Mapping[str, Any]) -> bool:
    needs = embedding["rope_type"] in ("yarn", "llama3", "longrope")
    return not needs or "original_max_position_embeddings" in embedding


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


def _is_experts_of_gemma4(value: Any, values: Mapping[str, Any]) -> bool:
    return _is_count(value, values) or (value is None and values.get("enable_moe_block") is False)


def _is_by_layer(value: Any, values: Mapping[str, Any]) -> bool:
    """Return whether a value states the heads of some layers."""
    return isinstance(value, Mapping) and all(
        isinstance(index, str)
        and index.isdecimal()
        and isinstance(fields, Mapping)
        and set(fields) <= {"head_dim", "num_key_value_heads"}
        and all(_is_count(size, values) for size in fields.values())
        for index, fields in value.items()
    )


def _is_tokens(value: Any, values: Mapping[str, Any]) -> bool:
    return is_tokens(value)


_FLAGS = (
    "attention_bias attention_k_eq_v attention_out_bias enable_moe_block mlp_bias norm_topk_prob qk_layernorm "
    "tie_word_embeddings use_bias use_double_wide_mlp use_parallel_residual use_qk_norm use_qkv_bias use_sliding_window"
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
    **dict.fromkeys(_TOKENS, _is_tokens),
    "head_dim": _is_head,
    "layer_types": _is_of_layers,
    "per_layer_config": _is_by_layer,
    "sliding_window": _is_count_or_none,
    "use_bidirectional_attention": _is_bidirectional,
}


def _check(name: str) -> _Check:
    return _CHECKS.get(name, _is_count)
