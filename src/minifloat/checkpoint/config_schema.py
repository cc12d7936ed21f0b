"""The fields of config.json and quantization_config that this package reads, and their values in any family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minifloat.checkpoint.schema import (
    Check,
    Unfit,
    any_object,
    check_fields,
    either,
    fields,
    flag,
    integer,
    list_of,
    map_of,
    number,
    text,
)
from minifloat.errors import CheckpointError, ConfigError

#: Deepest nesting of a file: that of configs of models within models is below ten.
MAX_DEPTH = 64
_MOST_LAYERS = 1 << 14  #: of any model, so that a damaged config cannot have millions of layers built

_COUNT = integer(1, expected="a positive integer")
_NATURAL = integer(0, expected="zero or a positive integer")
#: Some families have a size for each layer.
_SIZE = either("a positive integer", _COUNT, list_of(_NATURAL, nullable=True))
_LIMIT = integer(-1, expected="a positive integer, or -1 for none")
_LAYERS = integer(0, _MOST_LAYERS, expected=f"a number of layers up to {_MOST_LAYERS}")
#: The id of a token; -1 stands for none in some configs.
_TOKEN = integer(-1, expected="a token, which is an integer below 2**31")
TOKENS = either("a token or a list of tokens", _TOKEN, list_of(_TOKEN))
_ABOVE_ZERO = number(0, above=True)
_EPSILON = number(0, 1)
_ANY_NUMBER = number(-1e30, 1e30)


def _names(check: Check, *names: str) -> dict[str, Check]:
    return dict.fromkeys(" ".join(names).split(), check)


_ROPE_FIELDS: dict[str, Check] = {
    **_names(text, "rope_type type"),
    **_names(_ABOVE_ZERO, "rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor"),
    **_names(number(0), "mscale mscale_all_dim"),
    **_names(_COUNT, "original_max_position_embeddings"),
    **_names(number(0, 1, above=True), "partial_rotary_factor"),
    **_names(list_of(_ABOVE_ZERO), "short_factor long_factor"),
    **_names(list_of(_NATURAL), "mrope_section"),
}


def _rope(value: Any, where: str) -> None:
    """Check a rotary embedding, or one for each type of layers."""
    any_object(value, where)
    nested = {name: item for name, item in value.items() if isinstance(item, Mapping)}
    for name, item in nested.items():
        _rope(item, f"{where}.{name}")
    fields(_ROPE_FIELDS)(value, where)
    low, high = value.get("low_freq_factor"), value.get("high_freq_factor")
    if low is not None and high is not None and high <= low:
        raise Unfit(f"{where}.high_freq_factor", f"more than low_freq_factor, {low}", high)


#: Fields of the language model's part.
_MODEL: dict[str, Check] = {
    **_names(text, "model_type hidden_act hidden_activation tokenizer_class"),
    **_names(list_of(text, of="names"), "architectures layer_types"),
    **_names(_SIZE, "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size"),
    **_names(_COUNT, "moe_intermediate_size v_head_dim qk_nope_head_dim qk_rope_head_dim kv_lora_rank q_lora_rank"),
    **_names(_LAYERS, "num_hidden_layers num_layers n_layer n_layers num_nextn_predict_layers first_k_dense_replace"),
    **_names(
        either("zero or a positive integer", _NATURAL, list_of(_NATURAL, nullable=True)),
        "num_experts num_local_experts n_routed_experts num_experts_per_tok num_experts_per_token n_shared_experts "
        "top_k_experts moe_topk shared_expert_intermediate_size shared_intermediate_size num_kv_shared_layers",
    ),
    **_names(_LIMIT, "max_position_embeddings sliding_window"),
    **_names(_EPSILON, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon"),
    **_names(_ABOVE_ZERO, "rope_theta rope_local_base_freq attn_logit_softcapping final_logit_softcapping"),
    **_names(_ABOVE_ZERO, "query_pre_attn_scalar logits_scaling swiglu_limit"),
    **_names(number(0, 1), "partial_rotary_factor rotary_pct"),
    **_names(_ANY_NUMBER, "attention_multiplier embedding_multiplier residual_multiplier logit_scale"),
    **_names(_ANY_NUMBER, "routed_scaling_factor initializer_range"),
    **_names(_rope, "rope_scaling rope_parameters"),
    **_names(flag, "tie_word_embeddings use_sliding_window norm_topk_prob use_cache"),
    **_names(TOKENS, "bos_token_id eos_token_id pad_token_id"),
    **_names(either("a dtype", text, any_object), "dtype torch_dtype"),
    **_names(any_object, "auto_map"),
}
#: Parts of config.json.
_CONFIG: dict[str, Check] = {
    **_MODEL,
    "text_config": fields(_MODEL),
    **_names(any_object, "vision_config audio_config quantization_config compression_config"),
}

_ARGS: dict[str, Check] = {
    "num_bits": integer(1, 64),
    **_names(text, "type strategy scale_dtype zp_dtype format"),
    "group_size": either("a positive integer, or -1", integer(-1)),
    "block_structure": list_of(_COUNT, 2, of="positive integers"),
    "symmetric": flag,
    "dynamic": either('true, false or "local"', flag, text),
    "actorder": either("a name", text, flag),
}
_GROUP: dict[str, Check] = {
    "targets": list_of(text, of="names"),
    **_names(fields(_ARGS), "weights input_activations output_activations"),
    "format": text,
    "quant_algo": text,
}
_EXCLUSIONS = list_of(text, of="names")
_ALGORITHM: dict[str, Check] = {
    "quant_algo": text,
    "kv_cache_quant_algo": text,
    "group_size": integer(1),
    "quantized_layers": map_of(fields({"quant_algo": text, "group_size": integer(1)})),
    **_names(_EXCLUSIONS, "exclude_modules ignore"),
}
#: quantization_config of every layout, and ModelOpt's hf_quant_config.json.
_QUANTIZATION: dict[str, Check] = {
    **_ALGORITHM,
    **_names(text, "quant_method format fmt activation_scheme quantization_status version scale_fmt"),
    "config_groups": map_of(fields(_GROUP)),
    "kv_cache_scheme": fields(_ARGS),
    "weight_block_size": list_of(_COUNT, 2, of="positive integers"),
    **_names(_EXCLUSIONS, "ignored_layers modules_to_not_convert"),
    **_names(any_object, "transform_config sparsity_config"),
    "quantization": fields(_ALGORITHM),
}


def check_config(values: Mapping[str, Any], path: Path) -> None:
    check_depth(values, path, ConfigError)
    check_fields(values, _CONFIG, path, ConfigError)


def check_quantization(values: Mapping[str, Any], path: Path) -> None:
    check_depth(values, path, ConfigError)
    check_fields(values, _QUANTIZATION, path, ConfigError, "quantization_config")


def check_depth(value: Any, path: Path, error: type[CheckpointError]) -> None:
    """Raise an error if lists and objects are nested deeper than `MAX_DEPTH`, at which recursion is safe."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise error(path, f"nested more than {MAX_DEPTH} levels deep")
