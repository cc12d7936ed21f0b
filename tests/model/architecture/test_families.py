"""The table of families: its lookup, its rows against the installed transformers, and the general rules."""

import re
from pathlib import Path

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming

from minifloat.checkpoint import TensorInfo
from minifloat.model.architecture.decoder import why_not_type
from minifloat.model.architecture.decoder.parts import why_not_rope
from minifloat.model.architecture.families import FAMILIES, family_of
from minifloat.model.architecture.family import GENERAL, Family, Role
from minifloat.model.architecture.roles import fused_group, role_of
from minifloat.quantize.job import quantize_checkpoint

_MODEL_TYPES = [model_type for family in FAMILIES for model_type in family.model_types]
_WITH_RENAMES = [(family, name) for family in FAMILIES if family.renames is not None for name in family.model_types]
_MODULES = ("self_attn.q_proj", "mlp.gate_proj", "block_sparse_moe.gate", "mlp.gate", "linear_attn.in_proj_ba")


def info(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, "BF16", shape, "model.safetensors", 0, 0)


def test_every_model_type_is_in_one_row() -> None:
    assert len(_MODEL_TYPES) == len(set(_MODEL_TYPES))


@pytest.mark.parametrize("model_type", _MODEL_TYPES)
def test_every_model_type_is_one_of_transformers(model_type: str) -> None:
    assert model_type in CONFIG_MAPPING


@pytest.mark.parametrize(("family", "model_type"), _WITH_RENAMES, ids=lambda value: getattr(value, "name", value))
def test_declared_names_of_modules_are_those_of_transformers(family: Family, model_type: str) -> None:
    mapping = get_checkpoint_conversion_mapping(model_type) or []
    assert not any(isinstance(entry, PrefixChange) for entry in mapping)
    renamings = [entry for entry in mapping if type(entry) is WeightRenaming]
    for module in (f"model.layers.0.{name}" for name in _MODULES):
        expected = ours = module
        for renaming in renamings:
            expected = renaming.rename_source_key(f"{expected}.weight")[0].removesuffix(".weight")
        for pattern, replacement in family.renames or ():
            ours = re.sub(pattern, replacement, ours)
        assert ours == expected


def test_the_row_of_the_outer_model_type_decides() -> None:
    family = family_of({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}})
    assert family.name == "Llama 4"
    assert family.known


def test_a_multimodal_model_without_a_row_takes_that_of_its_decoder_but_not_its_names() -> None:
    family = family_of({"model_type": "llava", "text_config": {"model_type": "qwen3"}})
    assert family.name == "Qwen dense"
    assert family.renames is None


@pytest.mark.parametrize("config", [{"model_type": "never_heard_of"}, {}, {"model_type": 3, "text_config": []}])
def test_other_models_get_the_general_rules_and_are_called_unknown(config: dict[str, object]) -> None:
    family = family_of(config)
    assert not family.known
    assert family.fused_experts == GENERAL.fused_experts
    assert family.name == str(config.get("model_type", "unknown"))


def test_a_row_names_tensors_of_fused_experts_that_the_general_rules_do_not_know() -> None:
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    assert role_of(info(name, 4, 8, 16)) is Role.OTHER
    assert role_of(info(name, 4, 8, 16), family_of({"model_type": "granitemoe"})) is Role.EXPERTS


def test_a_row_gives_roles_to_matrices_that_the_general_rules_take_for_linears() -> None:
    name = "model.language_model.layers.0.altup.correction_coefs.weight"
    assert role_of(info(name, 4, 4)) is Role.LINEAR
    assert role_of(info(name, 4, 4), family_of({"model_type": "gemma3n"})) is Role.OTHER


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.0.self_attn.indexer.weights_proj",
        "model.layers.0.self_attn.indexer.wk",
        "model.layers.61.eh_proj",
        "model.layers.0.linear_attn.in_proj_ba",
        "model.language_model.layers.0.linear_attn.in_proj_a",
        "model.language_model.layers.0.linear_attn.in_proj_b",
    ],
)
def test_linears_that_servers_leave_unquantized_have_a_role_of_their_own_in_every_family(module: str) -> None:
    assert role_of(info(f"{module}.weight", 64, 64)) is Role.UNQUANTIZED_IN_SERVERS
    assert role_of(info("model.layers.0.linear_attn.in_proj_qkvz.weight", 64, 64)) is Role.LINEAR
    assert role_of(info("model.layers.0.self_attn.indexer.wq_b.weight", 64, 64)) is Role.LINEAR


def test_a_row_adds_groups_of_fused_linears_to_the_general_ones() -> None:
    family = family_of({"model_type": "qwen3_5_text"})
    assert fused_group("a.linear_attn.in_proj_z", family) == fused_group("a.linear_attn.in_proj_qkv", family)
    assert fused_group("a.self_attn.q_proj", family) == fused_group("a.self_attn.q_proj")
    assert fused_group("a.linear_attn.in_proj_z") == "a.linear_attn.in_proj_z"


def test_native_decoders_say_what_they_lack() -> None:
    assert not why_not_type("qwen3")
    assert not why_not_type("mixtral")
    assert "its model_type is 'bert', not one of" in why_not_type("bert")
    assert not why_not_rope({"rope_scaling": {"type": "yarn"}})
    assert not why_not_rope({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}})
    nested = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "dynamic"}}
    assert "its rotary embedding is 'dynamic', not one of" in why_not_rope({"rope_parameters": nested})


@pytest.mark.parametrize(
    ("model_type", "heads"), [(name, f.heads) for f in FAMILIES if f.heads != GENERAL.heads for name in f.model_types]
)
def test_the_heads_of_encoders_are_those_that_transformers_ties_to_the_embedding(
    model_type: str, heads: tuple[str, ...]
) -> None:
    with torch.device("meta"):
        config = CONFIG_MAPPING[model_type]()
        auto = AutoModelForMaskedLM if type(config) in MODEL_FOR_MASKED_LM_MAPPING else AutoModelForCausalLM
        model = auto.from_config(config)
    tied = {name.removesuffix(".weight") for name in model.all_tied_weights_keys if name.endswith(".weight")}
    assert tied == set(heads)


def test_encoders_are_quantized_and_their_tied_heads_listed_as_kept(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**sizes, vocab_size=300)).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "source")
    report = quantize_checkpoint(tmp_path / "source", tmp_path / "out", "fp8")
    assert report.share.fraction > 0.9
    loaded, found = BertForMaskedLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not found["missing_keys"]
    tokens = torch.arange(5, 25)[None]
    error = (loaded(tokens).logits - model(tokens).logits).float().norm() / model(tokens).logits.float().norm()
    assert 0 < error < 0.05
