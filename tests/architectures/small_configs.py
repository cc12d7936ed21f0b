"""Small configs of transformers' architectures: general rules by the names of fields, and exceptions as data.

`small_config` takes the default config of a model type, and replaces every field whose name it knows by a small value,
in nested configs too. `families.FAMILIES` has what a model type needs beyond that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

HIDDEN, INTERMEDIATE, EXPERT, HEADS, KV_HEADS, HEAD_DIM, LAYERS, EXPERTS, PER_TOKEN = 128, 256, 128, 4, 2, 32, 2, 4, 2
#: A byte each, then the special tokens.
VOCABULARY = 320
BOS, EOS = 256, 257
#: The first of the ids that stand for images, audio and the like; they never occur in a prompt.
_FIRST_SPECIAL = 300
_MAX_LAYERS = 4

#: Patterns of the names of integer fields and their small values; the first that matches decides.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|text_vocab_size|padded_vocab_size", VOCABULARY),
    (r"(bos|decoder_start|boi|boa)_token_id", BOS),
    (r"(eos|eoi|eoa|sep)_token_id", EOS),
    (r"shared_expert_intermediate_size|moe_shared_expert_intermediate_size", EXPERT),
    (r"moe_intermediate_size|expert_ffn_hidden_size|moe_ffn_hidden_size|expert_dim|expert_intermediate_size", EXPERT),
    (
        r"intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|d_ff|n_inner|block_ff_dim|shared_intermediate_size",
        INTERMEDIATE,
    ),
    (r"(encoder|decoder)_ffn_dim|mlp_dim|dense_intermediate_size|feed_forward_size", INTERMEDIATE),
    (
        r"hidden_size|d_model|n_embd|dim|embed_dim|model_dim|embedding_size|hidden_dim|out_hidden_size|text_hidden_size|word_embed_proj_dim",
        HIDDEN,
    ),
    (r"num_hidden_layers|num_layers|n_layers?|depth|depths|(encoder|decoder)_layers|num_blocks", LAYERS),
    (r"num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num|decoder_kv_heads", KV_HEADS),
    (r"num_attention_heads|n_heads?|num_heads|(encoder|decoder)_attention_heads|attention_heads", HEADS),
    (r"head_dim|attention_head_size|attention_head_dim|kv_channels|global_head_dim|swa_head_dim", HEAD_DIM),
    (
        r"(num_experts_per_tok|moe_topk|moe_top_k|experts_per_token|moe_k|top_k_experts|num_experts_per_token)",
        PER_TOKEN,
    ),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_moe_experts", EXPERTS),
    (r"vocab_size_per_layer_input", VOCABULARY),
    (r"hidden_size_per_layer_input", 32),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|linear_lora_rank", 32),
    (r"qk_rope_head_dim|rope_head_dim", 16),
    (r"qk_nope_head_dim", 32),
    (r"v_head_dim", 32),
    (r"qk_head_dim", 48),
    (r"index_n_heads", 4),
    (r"index_head_dim", 32),
    (r"index_topk", 64),
    (r"first_k_dense_replace|moe_layer_start_index|num_dense_layers|n_dense_layers", 1),
    (r"rotary_dim", 16),
    (r"linear_head_dim", 32),
    (r"linear_num_heads", 4),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads", 4),
    (r"linear_(key|value)_head_dim", 32),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", 32),
    (r"mamba_d_state|ssm_state_size|state_size|mamba_state_dim", 16),
    (r"mamba_dt_rank|time_step_rank", 8),
    (r"mamba_d_ssm", 256),
    (r"mamba_chunk_size|chunk_size", 16),
    (r"max_position_embeddings|n_positions|max_sequence_length|n_ctx|seq_length|max_seq_len|model_max_length", 256),
    (r"sliding_window|attention_window|local_attention|window_size", 64),
    (r"image_size", 32),
    (r"patch_size", 8),
    (r"vision_feature_layer|vision_feature_select_layer", -1),
    (r"num_nextn_predict_layers|mtp_num_hidden_layers|num_mtp_layers", 0),
    (r"query_pre_attn_scalar", HEAD_DIM),
)
#: The same for fields of other numbers.
_FACTORS: tuple[tuple[str, float], ...] = ((r"attention_multiplier", HEAD_DIM**-0.5),)
_COMPILED = tuple((re.compile(f"({pattern})"), value) for pattern, value in (*_SIZES, *_FACTORS))
_SPECIAL_TOKEN = re.compile(r"\w*(token_id|token_index|token_idx|_tok_id)s?")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def small_config(model_type: str, overrides: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Return a small config of a model type."""
    cls = CONFIG_MAPPING[model_type]
    config = cls(**_shrunk(cls(), overrides or {}))
    for part in _parts(config):
        if hasattr(part, "initializer_range"):
            part.initializer_range = 0.1
    return config


def _shrunk(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for a small config of the same class."""
    values: dict[str, Any] = {}
    special = iter(range(_FIRST_SPECIAL, VOCABULARY))
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    layers = _chosen_layers(fields)
    latent = "qk_rope_head_dim" in fields  # multi-head latent attention derives the sizes of its heads
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            values[name] = {"model_type": value.model_type, **_shrunk(value, overrides.get(name) or {})}
        elif name in _LAYER_COUNTS and layers is not None:
            values[name] = len(layers)
        elif layers is not None and isinstance(value, list) and len(value) == _layer_count(fields):
            values[name] = [value[index] for index in layers]
        elif isinstance(value, bool) or (latent and name in ("head_dim", "qk_head_dim")):
            continue
        elif latent and name == "num_key_value_heads":
            values[name] = HEADS
        elif isinstance(value, int | float):
            small = _small_value(name, value, special)
            if small is not None:
                values[name] = small
        elif isinstance(value, list) and _SPECIAL_TOKEN.fullmatch(name):
            values[name] = [EOS] if name == "eos_token_id" else [next(special) for _ in value]
    nested = {name for name, value in fields.items() if isinstance(value, PreTrainedConfig)}
    own = {name: value for name, value in overrides.items() if name not in nested or not isinstance(value, dict)}
    return values | own


def _small_value(name: str, value: float, special: Any) -> float | None:
    for pattern, small in _COMPILED:
        if pattern.fullmatch(name):
            return type(value)(small) if value > 0 else None
    if _SPECIAL_TOKEN.fullmatch(name) and isinstance(value, int) and value >= _FIRST_SPECIAL:
        return int(next(special))
    return None


def _layer_count(fields: Mapping[str, Any]) -> int:
    return next((fields[name] for name in _LAYER_COUNTS if isinstance(fields.get(name), int)), 0)


def _chosen_layers(fields: Mapping[str, Any]) -> list[int] | None:
    """Return layers that have each kind of the lists with an entry per layer; None if there are no such lists."""
    count = _layer_count(fields)
    lists = [value for value in fields.values() if isinstance(value, list) and count > 1 and len(value) == count]
    if not lists:
        return None
    first: dict[str, int] = {}
    for index, kind in enumerate(zip(*lists, strict=True)):
        first.setdefault(repr(kind), index)
    chosen = sorted(first.values())[:_MAX_LAYERS]
    return chosen if len(chosen) > 1 else [chosen[0], chosen[0]]


def _parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a config and all nested ones."""
    nested = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(part for value in nested for part in _parts(value))]
