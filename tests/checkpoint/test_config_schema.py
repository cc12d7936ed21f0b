"""Every field of a config that is read has the type and range that it needs, or the error names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.config_schema import MAX_DEPTH
from minifloat.errors import CheckpointError, ConfigError

ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def write(folder: Path, config: Any, name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(config if isinstance(config, str) else json.dumps(config))
    if not (folder / "model.safetensors").exists():
        save_file({"a": np.zeros(3, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("hidden_size", 0, "a positive integer, found 0"),
        ("hidden_size", True, "a positive integer, found True"),
        ("vocab_size", 10**30, "a positive integer, found 1"),
        ("num_hidden_layers", 1_000_000, "a number of layers up to 16384, found 1000000"),
        ("num_hidden_layers", "2", "a number of layers up to 16384, found '2'"),
        ("rms_norm_eps", float("inf"), "a finite number of at least 0 and at most 1, found inf"),
        ("rms_norm_eps", float("nan"), "a finite number .* found nan"),
        ("rms_norm_eps", -1e-5, "a finite number .* found -1e-05"),
        ("rms_norm_eps", 10**400, "a finite number .* found 1000"),
        ("layer_norm_eps", "1e-5", "a finite number .* found '1e-5'"),
        ("rope_theta", 0, "a finite number above 0, found 0"),
        ("rope_theta", -10000.0, "a finite number above 0, found -10000.0"),
        ("architectures", "LlamaForCausalLM", "a list of names, found 'LlamaForCausalLM'"),
        ("architectures", {"a": 1}, "a list of names"),
        ("eos_token_id", "</s>", "a token or a list of tokens, found '</s>'"),
        ("eos_token_id", [1, 2.5], "a token or a list of tokens"),
        ("eos_token_id", 2**31, "a token or a list of tokens"),
        ("tie_word_embeddings", "no", "true or false, found 'no'"),
        ("model_type", 5, "a string, found 5"),
        ("layer_types", [1], "a string, found 1"),
        ("text_config", [], "an object, found"),
        ("rope_scaling", "linear", "an object, found 'linear'"),
        ("quantization_config", "fp8", "an object, found 'fp8'"),
    ],
)
def test_a_field_that_no_model_has_is_named_with_its_rule(
    tmp_path: Path, field: str, value: Any, expected: str
) -> None:
    folder = write(tmp_path / "model", {"model_type": "llama", field: value})
    with pytest.raises(ConfigError, match=rf"config\.json: {field}(\[0\])?: expected {expected}"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": -8.0}, "rope_scaling.factor: expected a finite number above 0, found -8.0"),
        ({"factor": 0}, "rope_scaling.factor: expected"),
        ({"factor": float("inf")}, "rope_scaling.factor: expected"),
        ({"rope_type": None, "type": 3}, "rope_scaling.type: expected a string"),
        ({"high_freq_factor": 1.0}, r"high_freq_factor: expected more than low_freq_factor, 1.0, found 1.0"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings: expected a positive integer"),
        ({"long_factor": [1.0, -1.0]}, r"rope_scaling.long_factor\[1\]: expected a finite number above 0"),
        ({"full_attention": {"factor": -1}}, "rope_scaling.full_attention.factor: expected"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_rotary_embedding_that_no_model_has_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str, nested: bool
) -> None:
    fields = {"rope_scaling": ROPE | change}
    folder = write(tmp_path / "model", {"text_config": fields} if nested else fields)
    with pytest.raises(ConfigError, match=message):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"config_groups": {"g": {"targets": "Linear"}}}, r"config_groups\.g\.targets: expected a list of names"),
        ({"config_groups": {"g": {"targets": [1]}}}, r"config_groups\.g\.targets\[0\]: expected a string"),
        ({"config_groups": {"g": {"weights": []}}}, r"config_groups\.g\.weights: expected an object"),
        ({"config_groups": []}, "config_groups: expected an object"),
        (
            {"config_groups": {"g": {"weights": {"block_structure": [0, 128]}}}},
            r"weights\.block_structure\[0\]: expected a positive integer, found 0",
        ),
        (
            {"config_groups": {"g": {"weights": {"block_structure": ["128", 128]}}}},
            r"block_structure\[0\]: expected a positive integer, found '128'",
        ),
        ({"config_groups": {"g": {"weights": {"group_size": "32"}}}}, "group_size: expected a positive integer"),
        ({"weight_block_size": [128]}, "weight_block_size: expected a list of 2 positive integers"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size\[1\]: expected a positive integer"),
        ({"kv_cache_scheme": "fp8"}, "kv_cache_scheme: expected an object"),
        ({"quantized_layers": {"m": "FP8"}}, r"quantized_layers\.m: expected an object"),
        ({"ignore": "lm_head"}, "ignore: expected a list of names"),
    ],
)
@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
def test_a_quantization_config_of_other_types_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str, place: str
) -> None:
    folder = write(tmp_path / "model", {"quantization_config": config} if place == "config.json" else {})
    if place != "config.json":
        write(folder, config, place)
    with pytest.raises(ConfigError, match=rf"{place}: quantization_config.*{message}"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_key_value_heads": [2, None, 4], "intermediate_size": [8, 16]},
        {"max_position_embeddings": -1, "sliding_window": 0, "num_local_experts": 0, "pad_token_id": -1},
        {"eos_token_id": [1, 2], "dtype": {"": "bfloat16"}, "architectures": None, "rope_scaling": None},
        {"rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_type": "default"}}},
        {"time_step_limit": [0.0, float("inf")], "a_field_of_a_new_family": {"x": [1, "y"]}},
    ],
)
def test_what_models_have_is_accepted(tmp_path: Path, config: dict[str, Any]) -> None:
    with Checkpoint.open(write(tmp_path / "model", config)) as checkpoint:
        assert checkpoint.config == config


def nested(depth: int, text: str = "1") -> str:
    return '{"a":' * depth + text + "}" * depth


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"])
def test_json_that_is_nested_deeply_is_refused(tmp_path: Path, name: str, depth: int) -> None:
    folder = write(tmp_path / "model", {})
    write(folder, nested(depth), name)
    with pytest.raises(CheckpointError, match=rf"{name}: (nested|no weight_map)"):
        Checkpoint.open(folder)


def test_half_of_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", '{"model_type": "llama", "note": "\\ud800"}')
    with pytest.raises(ConfigError, match=r"config\.json: not UTF-8"):
        Checkpoint.open(folder)
