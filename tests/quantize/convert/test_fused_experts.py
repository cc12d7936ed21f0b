"""Experts that a model stores fused: quantized one by one, loaded, and fused again by ``--dequantize``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from converting import dequantize
from safetensors.torch import load_file, save_file
from saved_families import logits_of, relative_difference, save_family_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers import logging as transformers_logging

from minifloat.deploy.check import LoadVerdict, check_checkpoint
from minifloat.errors import ConversionError
from minifloat.model.architecture import families
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.quantize.job import quantize_checkpoint

#: Families that store experts fused, and the class of auto models that loads them.
FAMILIES = {
    "aria": AutoModelForImageTextToText,
    "gemma4": AutoModelForImageTextToText,
    "granitemoe": AutoModelForCausalLM,
    "granitemoehybrid": AutoModelForCausalLM,
    "granitemoeshared": AutoModelForCausalLM,
    "llama4": AutoModelForImageTextToText,
    "qwen3_vl_moe": AutoModelForImageTextToText,
    "qwen3_vl_moe, square": AutoModelForImageTextToText,  # gate_up_proj is 64x64, and 2 x 32 = 64
}
#: Families that have experts, and that plain transformers loads from single ones of compressed-tensors.
READ_SINGLE = ("llama4", "phimoe", "mixtral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: save_family_model(name, root / name) for name in {*FAMILIES, *READ_SINGLE}}


@pytest.fixture(autouse=True)
def quiet() -> object:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    yield
    transformers_logging.set_verbosity(before)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_experts_are_quantized_loaded_and_fused_again(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    source = load_file(folders[family] / "model.safetensors")
    quantize_checkpoint(folders[family], tmp_path / "quantized", "fp8")
    experts = [name for name, tensor in source.items() if tensor.ndim == 3 and "layers" in name]
    assert len(experts) == 4
    assert not set(experts) & set(load_file(tmp_path / "quantized" / "model.safetensors"))

    dequantize(tmp_path / "quantized", tmp_path / "plain", "float32")
    decoded = load_file(tmp_path / "plain" / "model.safetensors")
    assert set(decoded) == set(source)
    if family != "qwen3_vl_moe":  # transformers saves [E, N, K], and released checkpoints are [E, K, N]
        assert {name: decoded[name].shape for name in experts} == {name: source[name].shape for name in experts}
    model, info = FAMILIES[family].from_pretrained(tmp_path / "plain", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    ours = logits_of(load(tmp_path / "quantized", LoadOptions(dtype=torch.float32)))
    assert relative_difference(logits_of(model.eval()), ours) < 2e-5
    original = logits_of(load(folders[family], LoadOptions(dtype=torch.float32)))
    assert 1e-3 < relative_difference(ours, original) < 0.4


@pytest.mark.parametrize("family", [*FAMILIES, "phimoe", "mixtral"])
def test_check_says_whether_plain_transformers_makes_experts_of_single_ones(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    quantize_checkpoint(folders[family], tmp_path / "quantized", "fp8")
    report = check_checkpoint(tmp_path / "quantized", "transformers:cpu")
    auto = FAMILIES.get(family, AutoModelForCausalLM)
    model, info = auto.from_pretrained(tmp_path / "quantized", dtype=torch.float32, output_loading_info=True)
    ours = logits_of(load(tmp_path / "quantized", LoadOptions(dtype=torch.float32)))
    right = relative_difference(logits_of(model.eval()), ours) < 2e-5
    assert right is (family in READ_SINGLE)
    assert right is not any(info.values())
    assert (report.verdict is LoadVerdict.WRONG) is not right
    assert ("transformers-single-experts" in [finding.rule for finding in report.findings]) is not right


def test_check_says_that_vllm_does_not_read_single_experts_of_aria(folders: dict[str, Path], tmp_path: Path) -> None:
    report = check_checkpoint(folders["aria"], "vllm:h100", scheme="fp8-dynamic")
    assert "vllm-single-experts" in [finding.rule for finding in report.failures]
    assert not check_checkpoint(folders["gemma4"], "vllm:h100", scheme="fp8-dynamic").failures


def test_transposed_experts_of_either_kind_give_the_same_model(folders: dict[str, Path], tmp_path: Path) -> None:
    released = tmp_path / "released"
    released.mkdir()
    for file in folders["qwen3_vl_moe"].iterdir():
        (released / file.name).write_bytes(file.read_bytes())
    tensors = load_file(released / "model.safetensors")
    save_file(
        {name: tensor.mT.contiguous() if "experts." in name else tensor for name, tensor in tensors.items()},
        released / "model.safetensors",
        {"format": "pt"},
    )
    for source, name in ((released, "a"), (folders["qwen3_vl_moe"], "b")):
        quantize_checkpoint(source, tmp_path / name, "mxfp4")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    dequantize(tmp_path / "a", tmp_path / "plain")
    decoded = load_file(tmp_path / "plain" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in decoded.items()} == {
        name: tensor.shape for name, tensor in load_file(released / "model.safetensors").items()
    }


def test_experts_that_are_quantized_in_part_cannot_be_fused(folders: dict[str, Path], tmp_path: Path) -> None:
    quantize_checkpoint(folders["gemma4"], tmp_path / "quantized", "fp8")
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    module = "model.language_model.layers.1.experts.2.up_proj"
    weight, scale = tensors.pop(f"{module}.weight"), tensors.pop(f"{module}.weight_scale")
    tensors[f"{module}.weight"] = (weight.float() * scale).bfloat16()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConversionError, match=rf"{module} is not quantized.*quantize all experts alike"):
        dequantize(tmp_path / "quantized", tmp_path / "plain")


def test_an_unknown_family_is_fused_as_transformers_tables_say(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model_type in ("gemma4", "gemma4_text"):
        monkeypatch.delitem(families._BY_TYPE, model_type)
    quantize_checkpoint(folders["gemma4"], tmp_path / "quantized", "fp8")
    dequantize(tmp_path / "quantized", tmp_path / "plain", "float32")
    shapes = {name: tensor.shape for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items()}
    source = load_file(folders["gemma4"] / "model.safetensors")
    assert shapes == {name: tensor.shape for name, tensor in source.items()}
    assert check_checkpoint(tmp_path / "quantized", "transformers:cpu").verdict is LoadVerdict.WRONG
