"""Tensors and caches of architectures without formulas agree with saved models, real passes and hand arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from minifloat import load
from minifloat.checkpoint import Checkpoint
from minifloat.deploy.estimate import PlanOptions, plan_model
from minifloat.deploy.estimate.model_source import tensors_of
from minifloat.deploy.estimate.shape import cache_bytes, model_shape, state_bytes
from minifloat.errors import ConfigError
from minifloat.numerics.formats import BFLOAT16
from minifloat.quantize.job import quantize_checkpoint

_GEMMA = {"head_dim": 16, "sliding_window": 32}
_MAMBA = {
    "layers_block_type": ["mamba", "attention", "moe"],
    "num_hidden_layers": 3,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "head_dim": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
#: Model type -> what its config has beyond the common sizes; families of every kind that has no formulas of its own.
_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": {**_GEMMA, "global_head_dim": 32, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0},
    "hunyuan_v1_dense": {"head_dim": 16},
    "nemotron_h": _MAMBA,
    "qwen3_next": {},
    "gpt_oss": {},
    "llama4_text": {},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
}


@pytest.mark.parametrize("model_type", _FAMILIES)
def test_tensors_from_the_config_are_those_that_transformers_saves(
    model_type: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", model_type, **_FAMILIES[model_type])
    with Checkpoint.open(folder) as checkpoint:
        saved = {info.name: info.shape for info in checkpoint.tensors.values()}
    config = json.loads((folder / "config.json").read_text())
    assert {tensor.name: tensor.shape for tensor in tensors_of(config, folder)} == saved


@pytest.mark.parametrize("model_type", _FAMILIES)
def test_caches_are_those_that_a_generating_model_fills(
    model_type: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", model_type, **_FAMILIES[model_type])
    shape = model_shape(json.loads((folder / "config.json").read_text()), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokens = 20
    layers = model(torch.arange(tokens)[None], use_cache=True).past_key_values.layers
    held = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    assert cache_bytes(shape.cache, tokens, BFLOAT16) == sum(tensor.nbytes for tensor in held if tensor is not None)
    states = [getattr(layer, name, {}) for layer in layers for name in ("conv_states", "recurrent_states")]
    assert state_bytes(shape.cache) == sum(tensor.nbytes for state in states for tensor in state.values())
    assert not shape.notes


def test_states_of_linear_attention_agree_with_arithmetic_by_hand() -> None:
    # Qwen3-Next's own sizes: keys and queries 16 x 128, values 32 x 128, a convolution over 4 tokens
    layers = model_shape({"model_type": "qwen3_next", "num_hidden_layers": 4}, Path()).cache
    convolution, recurrent = (2 * 16 + 32) * 128 * 4 * 2, 32 * 128 * 128
    assert [layer.heads for layer in layers] == [0, 0, 0, 2]
    for layer in layers[:3]:
        assert layer.state - convolution in (2 * recurrent, 4 * recurrent)  # in BF16 or float32
        assert layer.state_operations == 5 * recurrent
    assert state_bytes(layers) == 3 * layers[0].state


def test_layers_that_share_keys_and_values_keep_none_of_their_own() -> None:
    text = {"num_hidden_layers": 10, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2}
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512}
    gemma3n = {"model_type": "gemma3n_text", **text, **sizes, "num_kv_shared_layers": 5}
    layers = model_shape(gemma3n, Path()).cache
    assert cache_bytes(layers, 1000, BFLOAT16) == 2 * 2 * 2 * 256 * (4 * 512 + 1000)


def test_a_config_without_the_fields_of_its_class_takes_their_defaults() -> None:
    hub = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}
    shape = model_shape({**hub, "text_config": {**hub["text_config"], "num_hidden_layers": 6}}, Path())  # type: ignore[dict-item]
    assert (shape.heads, shape.kv_heads, shape.query_dim) == (8, 4, 256)
    assert [layer.window for layer in shape.cache].count(None) == 1


def test_an_architecture_that_transformers_lacks_is_planned_from_its_weights(
    llama_folder: Path, tmp_path: Path
) -> None:
    config = json.loads((llama_folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((llama_folder / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "brand_new"}))
    plan, known = plan_model(tmp_path, "fp8", "h100"), plan_model(llama_folder, "fp8", "h100")
    assert [scheme.weights for scheme in plan.schemes] == [scheme.weights for scheme in known.schemes]
    assert plan.caches == known.caches
    assert any("transformers does not have 'brand_new'" in note for note in plan.notes)
    sizes = {name: size for name, size in config.items() if not name.startswith(("num_", "hidden_size", "vocab"))}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "model_type": "brand_new"}))
    blind = plan_model(tmp_path, "fp8", "h100")
    assert [scheme.weights for scheme in blind.schemes] == [scheme.weights for scheme in known.schemes]
    assert any("The KV cache is not counted" in note for note in blind.notes)
    assert any("does not tell hidden_size, num_attention_heads, vocab_size" in note for note in blind.notes)


def test_a_config_that_its_class_refuses_is_an_error_that_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2", "num_hidden_layers": "many"}))
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        plan_model(tmp_path, hardware="h100")


def test_a_mixture_of_a_trillion_weights_is_planned_layer_by_layer(tmp_path: Path) -> None:
    config = {
        "model_type": "glm4_moe",
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 60,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_model(tmp_path, "fp8-block", "h200", PlanOptions(gpus=8))
    assert plan.counts.total > 59 * 384 * 3 * 7168 * 2048  # a trillion


def test_numbers_that_json_lacks_are_read_as_transformers_saves_them_and_written_back(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_model(tmp_path / "model", "nemotron_h", **_FAMILIES["nemotron_h"])
    config = json.loads((source / "config.json").read_text())
    infinite = [key for key, value in config.items() if "__float__" in str(value)]
    assert infinite  # time_step_limit
    quantize_checkpoint(source, tmp_path / "out", "fp8")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [written[key] for key in infinite] == [config[key] for key in infinite]
    model = load(tmp_path / "out").model
    limits = model.config.time_step_limit
    assert limits[1] == float("inf")
    assert plan_model(tmp_path / "out", hardware="h100").state > 0
