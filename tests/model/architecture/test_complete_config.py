"""Configs that transformers saves are read without it: plans and fields are those of its classes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from config_agreement import FOLDER, same
from native_cases import CASES, TOWERS, VOCAB, config_of, config_with_tower

from minifloat.model.architecture.decoder import NATIVE
from minifloat.model.architecture.decoder_config import DecoderConfig, read_config, read_short_config

#: Types whose configs are read here; some with latent attention are left to transformers.
STATED = {name: native.stated.split() for name, native in NATIVE.items() if native.stated}
READ = {*STATED, "llama", "mistral", "mixtral", "qwen2_moe"}
#: Cases whose parts contradict each other in ``tie_word_embeddings``.
LEFT = {"gemma4", "gemma4 with experts"}


def saved(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config.to_json_string())
    return values


@pytest.mark.parametrize("name", [name for name, (model_type, _) in CASES.items() if model_type in READ])
def test_what_transformers_saves_is_read_as_transformers_reads_it(name: str) -> None:
    same(saved(config_of(name)))


@pytest.mark.parametrize("name", [name for name in TOWERS if name not in LEFT])
def test_text_models_beside_towers(name: str) -> None:
    values = saved(config_with_tower(name))
    text = same(values).get_text_config(decoder=True)
    assert text.model_type == values["text_config"]["model_type"]


def test_parts_that_contradict_each_other_are_left_to_transformers() -> None:
    values = saved(config_with_tower("gemma4"))
    assert read_config(values, FOLDER) == "its parts contradict each other in tie_word_embeddings"
    same(values | {"tie_word_embeddings": True})
    assert read_config({"model_type": "gemma4"}, FOLDER) == "text_config or tie_word_embeddings is missing"


def test_gpt_oss_as_it_was_published() -> None:
    values = saved(config_of("gpt_oss"))
    rope = values.pop("rope_parameters")
    del values["swiglu_alpha"]
    older = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "experts_per_token": 2}
    same(values | older | {"initial_context_length": 32})


@pytest.mark.parametrize("model_type", STATED)
def test_a_field_that_is_missing_has_its_default_or_is_left_to_transformers(model_type: str) -> None:
    name = next(name for name, case in CASES.items() if case[0] == model_type)
    config = config_of(name)
    text = saved(config) if config.model_type == model_type else saved(config)["text_config"]
    assert isinstance(read_config(text, FOLDER), DecoderConfig)
    for field in STATED[model_type]:
        less = {key: value for key, value in text.items() if key != field}
        if not isinstance(read_short_config(less, FOLDER), DecoderConfig) and not isinstance(
            read_config(less, FOLDER), str
        ):
            same(less)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("glm", {"surprise": 1, "transformers_version": "5.24.0"}, "it has the field 'surprise'"),
        ("glm", {"sliding_window": 20}, "it has the field 'sliding_window'"),
        ("glm", {"is_encoder_decoder": True}, "it has the field 'is_encoder_decoder'"),
        ("glm", {"head_dim": 15}, "head_dim is missing or unusual"),
        ("nemotron", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "which part of a head turns"),
        ("nemotron", {"rope_parameters": {"rope_type": "default"}}, "not stated completely"),
        ("nemotron", {"rope_theta": 1e4}, "in an older form"),
        ("ministral", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "the context of training"),
        ("granite", {"num_attention_heads": 5}, "hidden_size is not a multiple"),
        ("smollm3", {"use_sliding_window": False, "sliding_window": 20}, "a sliding window that it does not use"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types is missing or unusual"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {}}}, "not those of its types of layers"),
        ("gemma4_text", {"layer_types": ["sliding_attention"] * 6}, "layer_types is missing or unusual"),
        ("gemma4_text", {"per_layer_config": {"1": {"intermediate_size": 8}}}, "per_layer_config is missing"),
        ("gemma4_text with experts", {"num_experts": None}, "num_experts is missing or unusual"),
        ("gemma2", {"vocab_size": str(VOCAB)}, "vocab_size is missing or unusual"),
    ],
)
def test_other_configs_are_left_to_transformers(name: str, changes: dict[str, Any], reason: str) -> None:
    assert reason in str(read_config(saved(config_of(name)) | changes, FOLDER))
