"""Configs as they are on the hub: read without transformers, as transformers reads them; what code reads is obeyed."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import logging
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from config_agreement import FOLDER, same
from hub_configs import HUB_CONFIGS
from native_cases import CASES, config_of
from transformers import CONFIG_MAPPING, PreTrainedConfig

from minifloat.model.architecture import decoder_config
from minifloat.model.architecture.decoder_config import DecoderConfig, read_config
from minifloat.model.architecture.families import NATIVE, OUTER
from minifloat.model.architecture.published_config import PUBLISHED, READ, TIED, is_unread
from minifloat.model.architecture.roles import text_of

SUPPORT = Path(__file__).parents[2] / "support"
#: Names that the patterns below find in code and that no config.json states, or that are read for other things than
#: the computation: names of kernels, of classes and labels, of parts for images, and arguments of functions.
NO_FIELDS = {
    *("_attn_implementation", "allow_is_causal_skip", "default_theta", "get", "get_text_config", "json"),
    *("id2label", "label2id", "output_hidden_states", "problem_type", "return_dict", "validate_rope"),
    *("standardize_rope_params", "past_key_values", "token_type_ids", "cu_seq_lens_q", "mm_token_type_ids"),
    *("image_grid_thw", "video_grid_thw", "image_token_id", "video_token_id", "mm_tokens_per_image", "vision_config"),
    *("depth", "in_channels", "num_heads", "num_position_embeddings", "out_hidden_size", "patch_size"),
    *("spatial_merge_size", "temporal_patch_size", "deepstack_visual_indexes", "embed_dim", "mlp_ratio"),
    *("fullatt_block_indexes", "window_size", "attention_context_left", "attention_context_right"),
    *("attention_invalid_logits_value", "attention_logit_cap", "audio_config", "audio_token_id", "conv_kernel_size"),
    *("gradient_clipping", "output_proj_dims", "pooling_kernel_size", "position_embedding_size", "residual_weight"),
    *("return_shared_kv_states", "shared_kv_states", "standardize", "subsampling_conv_channels"),
    "use_clipped_linears",
}
PATTERNS = (
    r"\b\w*config\.(\w+)",
    r"(?:get|has)attr\((?:self\.)?\w*config\w*,\s*\"(\w+)\"",
    r"kwargs\.(?:get|pop)\(\s*\"(\w+)\"",
)
#: Types that are read without transformers.
QUICK = [name for name, native in NATIVE.items() if native.stated or native.short]


@cache
def names_in(module: str) -> frozenset[str]:
    source = inspect.getsource(importlib.import_module(module))
    return frozenset(name for pattern in PATTERNS for name in re.findall(pattern, source))


def read_by_transformers(model_type: str) -> set[str]:
    """The fields that the code of a type may read: its module, its config, and what caches, masks and rotation read."""
    configs = CONFIG_MAPPING[model_type]
    modules = [configs.__module__, configs.__module__.replace("configuration_", "modeling_")]
    shared = ["transformers.modeling_rope_utils", "transformers.masking_utils", "transformers.cache_utils"]
    fields = {field.name for field in dataclasses.fields(configs)}
    aliases = {*configs.attribute_map, *configs.attribute_map.values()}
    return {*fields, *aliases, *(name for module in modules + shared for name in names_in(module))} - NO_FIELDS


def text_of_case(model_type: str) -> dict[str, Any]:
    """A small config of a type, as transformers saves it."""
    name = next(name for name, case in CASES.items() if case[0] == model_type)
    values: dict[str, Any] = json.loads(text_of(config_of(name)).config.to_json_string())
    return values


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_a_config_of_the_hub_is_read_as_transformers_reads_it(name: str) -> None:
    same(json.loads(json.dumps(HUB_CONFIGS[name])))


def test_all_are_read_without_transformers() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SUPPORT)!r})\n"
        "from pathlib import Path\nfrom hub_configs import HUB_CONFIGS\n"
        "from minifloat.model.architecture.decoder import decoder_layout\n"
        "from minifloat.model.architecture.decoder_config import read_config\n"
        "from minifloat.model.architecture.roles import text_of\n"
        "for values in HUB_CONFIGS.values(): decoder_layout(text_of(read_config(values, Path('m'))).config)\n"
        "print(len(HUB_CONFIGS), 'transformers' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == [str(len(HUB_CONFIGS)), "False"]
    assert len(HUB_CONFIGS) >= 40


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_defaults_are_those_of_transformers_class(model_type: str) -> None:
    published, configs = PUBLISHED[model_type], CONFIG_MAPPING[model_type]
    fields, aliases = {field.name: field for field in dataclasses.fields(configs)}, configs.attribute_map
    for name, default in published.defaults.items():
        found = fields.get(name) or fields[next(own for own, other in aliases.items() if other == name)]
        assert found.default == default, name
    theta = configs.default_theta
    assert published.theta == (theta["global"] if isinstance(theta, dict) else theta) or model_type == "gemma4_text"


@pytest.mark.parametrize("model_type", TIED)
def test_models_around_text_models_tie_as_their_classes_say(model_type: str) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    assert model_type in OUTER
    assert fields["tie_word_embeddings"] == TIED[model_type]


@pytest.mark.parametrize("model_type", QUICK)
def test_no_field_that_code_of_a_type_reads_is_ignored(model_type: str) -> None:
    """A field that the type obeys, or that changes nothing, is known; every other one has to be in `READ`."""
    native, published = NATIVE[model_type], PUBLISHED.get(model_type)
    known = {*decoder_config._UNREAD, *decoder_config._ROPE, *decoder_config._REQUIRED.split(), *native.fields}
    known |= {*decoder_config._TOKENS, "tie_word_embeddings", *dict(native.renamed).values()}
    if native.short:
        known |= {*native.short.required.split(), *dict(native.short.defaults), *decoder_config._WINDOWS}
    if published:
        known |= {*published.computed, published.every_field}
    assert read_by_transformers(model_type) - known - READ == set()


@pytest.mark.parametrize("model_type", QUICK)
def test_fields_that_change_the_computation_are_obeyed_or_left_to_transformers(model_type: str) -> None:
    values = text_of_case(model_type)
    assert isinstance(read_config(values, FOLDER), DecoderConfig)
    changed = {"attention_bias": True, "mlp_bias": True, "is_encoder_decoder": True, "partial_rotary_factor": 0.5}
    changed |= dict.fromkeys(("head_dim", "sliding_window", "attention_chunk_size", "num_kv_shared_layers"), 8)
    changed |= {"layer_types": ["sliding_attention"] * (values["num_hidden_layers"] - 1) + ["full_attention"]}
    changed |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "logit_scale": 0.5, "logits_scaling": 3.0}
    for name, value in changed.items():
        if not isinstance(read_config(values | {name: value}, FOLDER), str):
            same(values | {name: value})


def test_fields_that_no_code_reads_are_ignored_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    values = HUB_CONFIGS["HuggingFaceTB/SmolLM2-135M-Instruct"]
    with caplog.at_level(logging.DEBUG, logger="minifloat"):
        assert isinstance(read_config(values, FOLDER), DecoderConfig)
    assert [name in caplog.text for name in ("'is_llama_config'", "'transformers.js_config'", "'rope_interleaved'")]
    assert all(record.levelno == logging.DEBUG for record in caplog.records)


def test_a_file_of_a_later_transformers_may_state_what_later_code_reads() -> None:
    assert is_unread("surprise", {"surprise": 1})
    assert is_unread("surprise", {"surprise": 1, "transformers_version": "5.23.4"})
    assert not is_unread("surprise", {"surprise": 1, "transformers_version": "5.24.0.dev0"})
    values = HUB_CONFIGS["google/gemma-3-27b-it"]
    later = values | {"transformers_version": "6.0.0", "text_config": values["text_config"] | {"surprise": 1}}
    assert read_config(later, FOLDER) == "of its text_config it has the field 'surprise'"
    assert not is_unread("is_decoder", {"is_decoder": True})
    assert PreTrainedConfig().is_encoder_decoder is False
