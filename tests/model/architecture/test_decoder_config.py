"""`DecoderConfig` has the values of transformers' config classes, and leaves to them what it does not know."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minifloat.checkpoint import Checkpoint
from minifloat.errors import ConfigError
from minifloat.model.architecture.decoder_config import DecoderConfig, read_short_config
from minifloat.model.architecture.full_config import full_config
from minifloat.model.runtime.config import read_generation, read_generation_config

COMMON: dict[str, Any] = {
    "architectures": ["SomeModel"],
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
#: ``model_type`` -> the fields that its config.json must have besides `COMMON`.
TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**EXPERTS, "head_dim": 32},
}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
#: Fields that a config.json may have besides, and the model types that have them.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in TYPES),
    *((name, {"tie_word_embeddings": True, "eos_token_id": [3, 4], "bos_token_id": None}) for name in TYPES),
    *((name, {"pad_token_id": 5, "rope_theta": 500000.0, "rope_scaling": None}) for name in TYPES),
    *((name, {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e6}) for name in TYPES),
    *((name, {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}) for name in TYPES),
    ("llama", {"rope_scaling": LLAMA3, "attention_bias": True, "mlp_bias": True, "pretraining_tp": 1}),
    ("llama", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}, "head_dim": 8}),
    ("llama", {"head_dim": None, "attention_dropout": 0.1, "initializer_range": 0.1, "use_cache": False}),
    ("mistral", {"sliding_window": 20, "head_dim": 32}),
    ("mixtral", {"sliding_window": 20, "output_router_logits": False, "router_aux_loss_coef": 0.02}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}),
    ("qwen3", {"layer_types": ["full_attention"] * 3, "attention_bias": True, "sliding_window": None}),
    ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("qwen2_moe", {"qkv_bias": False, "mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": True}),
    ("qwen3_moe", {"mlp_only_layers": [], "norm_topk_prob": True, "use_sliding_window": False}),
]


def values_of(model_type: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": model_type, **COMMON, **TYPES[model_type], **extra}


@pytest.mark.parametrize(("model_type", "extra"), VARIANTS)
def test_values_are_those_of_transformers(model_type: str, extra: dict[str, Any]) -> None:
    values = values_of(model_type, extra)
    ours = read_short_config(values, Path("/models/m"))
    assert isinstance(ours, DecoderConfig), ours
    theirs = full_config(json.loads(json.dumps(values)), Path("/models/m"))
    for name, value in vars(ours).items():
        assert value == getattr(theirs, name), name
    for name in ("head_dim", "sliding_window", "layer_types", "attention_bias", "mlp_bias", "qkv_bias"):
        assert hasattr(ours, name) or getattr(theirs, name, None) in (None, False), name
    assert ours.get_text_config(decoder=True) is ours


@pytest.mark.parametrize(
    ("model_type", "extra", "reason"),
    [
        ("llama", {"model_type": "gemma2"}, "'gemma2' is not one of llama"),
        ("llama", {"surprise": 1, "transformers_version": "5.24.0.dev0"}, "'surprise'"),
        ("llama", {"vocab_size": "320"}, "vocab_size is missing or unusual"),
        ("llama", {"hidden_size": True}, "hidden_size is missing or unusual"),
        ("llama", {"rms_norm_eps": {"__float__": "NaN"}}, "rms_norm_eps is missing or unusual"),
        ("llama", {"num_attention_heads": 5}, "not a multiple"),
        ("llama", {"head_dim": 15}, "head_dim is unusual"),
        ("llama", {"hidden_size": 60}, "head_dim is odd"),
        ("llama", {"eos_token_id": "2"}, "eos_token_id is unusual"),
        ("llama", {"sliding_window": 20}, "sliding windows"),
        ("llama", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ("llama", {"rope_theta": None}, "rope_theta or rope_type is unusual"),
        ("qwen3", {"use_sliding_window": True}, "uses sliding windows"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "sliding windows are not stated"),
        ("mistral", {"sliding_window": -1}, "sliding_window is unusual"),
    ],
)
def test_other_configs_are_left_to_transformers(model_type: str, extra: dict[str, Any], reason: str) -> None:
    assert reason in str(read_short_config(values_of(model_type, extra), Path()))


@pytest.mark.parametrize("name", ["num_key_value_heads", "rms_norm_eps", "hidden_act"])
def test_a_field_whose_default_transformers_may_change_must_be_stated(name: str) -> None:
    values = values_of("llama", {})
    del values[name]
    assert read_short_config(values, Path()) == f"{name} is missing or unusual"


GENERATION: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [3, 4], "bos_token_id": 1},
    {"do_sample": False, "repetition_penalty": 1.1, "eos_token_id": 3, "transformers_version": "4.40.0"},
]


@pytest.mark.parametrize("values", GENERATION)
def test_generation_values_are_those_of_transformers(
    values: dict[str, Any], llama_folder: Path, tmp_path: Path
) -> None:
    for file in llama_folder.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with Checkpoint.open(tmp_path) as checkpoint:
        assert read_generation(checkpoint) is None
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        ours, theirs = read_generation(checkpoint), read_generation_config(checkpoint)
        assert isinstance(ours, SimpleNamespace)
        assert len(vars(ours)) == 7
        assert vars(ours) == {name: getattr(theirs, name) for name in vars(ours)}
        for text in ("[]", "{", '{"temperature": "hot"}', '{"eos_token_id": "</s>"}', '{"do_sample": 3}'):
            (tmp_path / "generation_config.json").write_text(text)
            with pytest.raises(ConfigError, match=r"generation_config\.json: "):
                read_generation(checkpoint)
