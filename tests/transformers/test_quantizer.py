"""``import minifloat.transformers``: models that transformers loads keep quantized weights, and answer as `load`."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig, pipeline

import minifloat.transformers
from minifloat.checkpoint import Checkpoint
from minifloat.errors import ConfigError, UsageError
from minifloat.kernels.pack import PackedWeight
from minifloat.model.runtime.experts import QuantizedExperts
from minifloat.model.runtime.linear import QuantizedLinear
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.quantize.job import quantize_checkpoint
from minifloat.transformers import quantizer

IN_FLOAT32 = LoadOptions(dtype=torch.float32)

minifloat.transformers.unregister()  # the import registers; tests of other modules need transformers as it is

MakeModel = Callable[..., Path]
IDS = torch.tensor([[5, 7, 11, 13, 17, 19]])


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    minifloat.transformers.register()
    yield
    minifloat.transformers.unregister()


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(IDS).logits
    return result


def from_pretrained(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **({"dtype": torch.float32} | options))


def quantized(model: Any) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


@pytest.mark.parametrize("scheme", ["fp8", "fp8-dynamic", "fp8-block", "mxfp8", "mxfp4", "nvfp4"])
def test_logits_are_those_of_load(scheme: str, make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen2", hidden_size=128, intermediate_size=128)  # q, k and v have biases
    quantize_checkpoint(folder, tmp_path / "q", scheme)
    model, expected = from_pretrained(tmp_path / "q"), load(tmp_path / "q", IN_FLOAT32)
    torch.testing.assert_close(logits(model), logits(expected), rtol=0, atol=0)
    assert len(quantized(model)) == len(quantized(expected)) == 14
    assert all(isinstance(module.held, PackedWeight) for module in quantized(model))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_stay_quantized(family: str, make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", family)
    quantize_checkpoint(folder, tmp_path / "q", "mxfp4")
    model = from_pretrained(tmp_path / "q")
    assert any(isinstance(module, QuantizedExperts) for module in model.modules())
    torch.testing.assert_close(logits(model), logits(load(tmp_path / "q", IN_FLOAT32)), rtol=0, atol=0)


@pytest.mark.parametrize("device_map", [None, "cpu", "auto", {"": "cpu"}])
def test_generate_and_pipelines_work(device_map: Any, llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8")
    model = from_pretrained(tmp_path / "q", device_map=device_map)
    assert quantized(model)
    expected = load(tmp_path / "q", IN_FLOAT32).generate(IDS, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), expected)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "q")
    text = pipeline("text-generation", model=model, tokenizer=tokenizer)("abc", max_new_tokens=4, do_sample=False)
    assert text[0]["generated_text"].startswith("abc")


def test_a_saved_model_has_the_tensors_of_the_checkpoint(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "mxfp8")
    model = from_pretrained(tmp_path / "q")
    model.save_pretrained(tmp_path / "saved")
    with Checkpoint.open(tmp_path / "q") as source, Checkpoint.open(tmp_path / "saved") as saved:
        assert saved.tensors.keys() == source.tensors.keys()
        for name in source.tensors:
            if "_proj" in name:
                assert saved.tensors[name].dtype == source.tensors[name].dtype
                assert (saved.read(name) == source.read(name)).all()
    torch.testing.assert_close(logits(from_pretrained(tmp_path / "saved")), logits(model), rtol=0, atol=0)


def test_saving_needs_the_folder_that_was_loaded(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8")
    model = from_pretrained(tmp_path / "q")
    shutil.rmtree(tmp_path / "q")
    with pytest.raises(UsageError, match="copies quantized tensors, which are not there now"):
        model.save_pretrained(tmp_path / "saved")


def test_declared_inputs_are_quantized_unless_weights_alone_are_asked_for(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8-dynamic")
    declared = logits(from_pretrained(tmp_path / "q"))
    minifloat.transformers.register(weight_only=True)
    weights = logits(from_pretrained(tmp_path / "q"))
    assert not torch.allclose(declared, weights, atol=1e-5)
    expected = logits(load(tmp_path / "q", LoadOptions(dtype=torch.float32, weight_only=True)))
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_unregistered_transformers_decodes_weights_again(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8")
    ours = logits(from_pretrained(tmp_path / "q"))
    minifloat.transformers.unregister()
    model = from_pretrained(tmp_path / "q")
    assert not quantized(model)
    torch.testing.assert_close(logits(model), ours, rtol=1e-4, atol=1e-4)
    minifloat.transformers.register()
    minifloat.transformers.register()  # does nothing
    assert quantized(from_pretrained(tmp_path / "q"))


def test_models_that_are_not_quantized_are_loaded_as_always(llama_folder: Path) -> None:
    model = from_pretrained(llama_folder)
    assert not quantized(model)
    assert model.lm_head.weight.requires_grad


def test_a_checkpoint_that_minifloat_does_not_read_is_left_to_transformers(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8")
    ours = logits(from_pretrained(tmp_path / "q"))

    def refuse(checkpoint: Checkpoint) -> None:
        raise ConfigError(checkpoint.path, "is of another kind")

    monkeypatch.setattr(quantizer, "describe", refuse)
    with caplog.at_level(logging.WARNING, "minifloat"):
        model = from_pretrained(tmp_path / "q")
    assert not quantized(model)
    torch.testing.assert_close(logits(model), ours, rtol=1e-4, atol=1e-4)
    assert "transformers loads this checkpoint without minifloat's kernels" in caplog.text
    assert "is of another kind" in caplog.text


def test_a_model_that_is_to_be_dequantized_is_left_to_transformers(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8")
    ours = logits(from_pretrained(tmp_path / "q"))
    config = CompressedTensorsConfig(dequantize=True)
    model = from_pretrained(tmp_path / "q", quantization_config=config)
    assert not quantized(model)
    torch.testing.assert_close(logits(model), ours, rtol=1e-4, atol=1e-4)
