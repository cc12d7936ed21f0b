"""Inputs in int8: what is refused, which weights have them, and what models with them compute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import compare_models
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minifloat.checkpoint import Checkpoint
from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.errors import KernelUnavailable, UnknownNameError, UsageError
from minifloat.kernels.linear import int8
from minifloat.model.layouts import describe
from minifloat.model.runtime.inputs import INT8_INPUTS, allows_int8
from minifloat.model.runtime.linear import QuantizedLinear, QuantizedWeight
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.quantize.job import quantize_checkpoint

MakeModel = Callable[..., Path]
IDS = torch.arange(40)[None]
CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(bool(int8.why_not()), reason=int8.why_not())


@pytest.fixture(scope="module", params=["fp8", "mxfp4"])
def quantized(request: pytest.FixtureRequest, make_llama: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized model whose norms have weights, because inputs that are BF16 over one BF16 often lie on ties."""
    folder = tmp_path_factory.mktemp("int8")
    file = make_llama(folder / "plain") / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    weights = load_file(file)
    for name in weights:
        if "norm" in name:
            weights[name] = (torch.rand(weights[name].shape, generator=generator) + 0.5).bfloat16()
    save_file(weights, file, metadata={"format": "pt"})
    quantize_checkpoint(folder / "plain", folder / "quantized", request.param)
    return folder / "quantized"


def allowed(folder: Path, choice: str = "int8", device: torch.device = CPU, **options: Any) -> bool:
    with Checkpoint.open(folder) as checkpoint:
        return allows_int8(choice, describe(checkpoint), device, **options)


def logits(folder: Path, **options: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = load(folder, LoadOptions(dtype=torch.float32, **options))(IDS).logits
    return result


def test_what_contradicts_int8_is_refused_with_the_reason(llama_folder: Path, quantized: Path, tmp_path: Path) -> None:
    assert not allowed(llama_folder, "bf16")
    with pytest.raises(UnknownNameError, match=r"unknown activations 'fp8'.*bf16, int8"):
        allowed(quantized, "fp8")
    with pytest.raises(UsageError, match="only CPUs have the kernels, and the model goes to cuda"):
        allowed(quantized, device=torch.device("cuda"))
    with pytest.raises(UsageError, match="the checkpoint has no quantized weights"):
        allowed(llama_folder)
    with pytest.raises(UsageError, match="activations int8 and prefill w8a8 exclude each other"):
        load(quantized, LoadOptions(activations="int8", prefill="w8a8", impl="reference"))
    quantize_checkpoint(llama_folder, tmp_path / "w8a8", "fp8-dynamic")
    with pytest.raises(UsageError, match="declares quantized inputs of its own, which weight_only"):
        allowed(tmp_path / "w8a8", weight_only=False)
    assert allowed(tmp_path / "w8a8", impl="reference")
    with pytest.raises(UsageError, match="the device decoder has no such kernels"):
        Engine(quantized, EngineOptions(runner="device", activations="int8", impl="reference"))


def test_a_processor_without_kernels_is_named(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "why_not", lambda weight=None: "" if weight else "this process uses avx2")
    with pytest.raises(KernelUnavailable, match="activations int8: this process uses avx2"):
        Engine(quantized, EngineOptions(activations="int8"))
    assert allowed(quantized, impl="reference")


def test_the_reference_rounds_the_inputs_of_every_quantized_weight(quantized: Path) -> None:
    model = load(quantized, LoadOptions(dtype=torch.float32, impl="reference"))
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            by_hand = nn.Linear(*reversed(module.shape), bias=False)
            by_hand.weight = nn.Parameter(int8.round_weight(module.quantized))
            largest = int8.largest_input(module.quantized)
            by_hand.register_forward_pre_hook(lambda _, args, most=largest: (int8.round_inputs(args[0], most),))
            model.set_submodule(name, by_hand)
    with torch.no_grad():
        expected = model(IDS).logits
    found = logits(quantized, impl="reference", activations="int8")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, logits(quantized, impl="reference"), rtol=1e-4, atol=1e-5)


@needs_kernels
def test_kernels_compute_what_the_reference_does(quantized: Path) -> None:
    expected = logits(quantized, impl="reference", activations="int8")
    found, plain = logits(quantized, activations="int8"), logits(quantized)
    # An input near a tie may round the other way, which changes the logits of its position and of those after it.
    assert (found - expected).abs().median() < (plain - expected).abs().median() / 10


@pytest.mark.parametrize("impl", ["reference", pytest.param("auto", marks=needs_kernels)])
def test_experts_round_their_inputs(impl: str, make_mixtral: MakeModel, tmp_path: Path) -> None:
    quantize_checkpoint(make_mixtral(tmp_path / "m"), tmp_path / "q", "fp8")
    model = load(tmp_path / "q", LoadOptions(impl=impl, activations="int8"))
    weights = [module for module in model.modules() if isinstance(module, QuantizedWeight)]
    assert len(weights) > 2 * 4 * 2
    assert all(weight.int8_inputs for weight in weights)
    difference = logits(tmp_path / "q", impl=impl, activations="int8") - logits(tmp_path / "q", impl=impl)
    assert 0 < difference.abs().median() < 0.1  # a rounded input may change the choice of experts for a token


@needs_kernels
def test_weights_without_a_kernel_are_named_and_all_of_them_are_an_error(
    quantized: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(int8, "why_not", lambda weight=None: "it is wide" if weight and wide(weight) else "")

    def wide(weight: Any) -> bool:
        return bool(weight.shape[0] > 64)

    model = load(quantized, LoadOptions(activations="int8"))
    assert (
        "14 quantized weights are not rounded to int8, because it is wide: model.layers.0.mlp.gate_proj" in caplog.text
    )
    assert not model.model.layers[0].mlp.gate_proj.int8_inputs
    assert model.model.layers[0].mlp.down_proj.int8_inputs
    monkeypatch.setattr(int8, "why_not", lambda weight=None: "it is a weight" if weight else "")
    with pytest.raises(KernelUnavailable, match="no weight of the model can have inputs in int8: it is a weight"):
        load(quantized, LoadOptions(activations="int8"))
    with pytest.raises(KernelUnavailable, match="no weight of the model can have inputs in int8: it is a weight"):
        Engine(quantized, EngineOptions(activations="int8"))


@needs_kernels
def test_the_log_says_what_it_would_gain(quantized: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "minifloat"):
        Engine(quantized, EngineOptions(activations="bf16"))
        assert "--activations int8" not in caplog.text
        Engine(quantized)
    assert (
        f"--activations int8 rounds them, and multiplies prompts and batches {int8.GAIN} times as fast" in caplog.text
    )


@pytest.mark.parametrize("impl", ["reference", pytest.param("auto", marks=needs_kernels)])
def test_the_engine_rounds_as_load_does_and_says_so(impl: str, quantized: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)  # of all rows: one row is never rounded
    engines = [
        Engine(quantized, EngineOptions(dtype="float32", impl=impl, lm_head="bf16", activations=name))
        for name in ("int8", "bf16")
    ]
    assert [engine.info.activations for engine in engines] == ["int8", "float32"]
    expected = logits(quantized, impl=impl, activations="int8")[0].log_softmax(-1)
    errors = []
    for engine in engines:
        (completion,) = engine.generate([IDS[0].tolist()], params)
        assert completion.prompt_logprobs is not None
        found = [entry.logprob for entry in completion.prompt_logprobs if entry is not None]
        wanted = expected[:-1].gather(1, IDS[0, 1:, None])[:, 0]
        errors.append((torch.tensor(found) - wanted).abs().median())
    assert errors[0] < errors[1] / 10


def test_compare_judges_the_model_with_rounded_inputs(quantized: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("In winter the river froze, and nobody crossed it. " * 40)

    def compared(**options: Any) -> Any:
        options |= {"window": 32, "prompts": 0, "lm_head": "bf16", "impl": "reference", "dtype": "float32"}
        result = compare_models(quantized, quantized, [text], **options)
        assert result.baseline.activations == "FP32"
        return result.candidates[0]

    assert (compared().model.activations, compared().overall.kl_max) == ("FP32", 0)
    rounded = compared(activations="int8")
    assert rounded.model.activations == INT8_INPUTS
    assert rounded.overall.kl_mean.value > 0
    with pytest.raises(UnknownNameError, match="unknown activations 'int4'"):
        compared(activations="int4")
