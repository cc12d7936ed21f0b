"""Inputs in FP8 for many rows: the log-probabilities of prompts against the simulation of the declared inputs."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.errors import KernelUnavailable, UsageError
from minifloat.kernels.linear import scaled_mm
from minifloat.model.runtime import linear
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.quantize.job import quantize_checkpoint

INTEROP = Path(__file__).parents[2] / "data" / "interop"
SCORED = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
PROMPT = [(37 * i * i + 11) % 64 for i in range(60)]
ROWS = 16  #: stands for `PREFILL_ROWS`


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "PREFILL_ROWS", ROWS)


def open_engine(folder: Path, activations: str = "auto", **options: Any) -> Engine:
    return Engine(folder, EngineOptions(dtype="float32", runner="device", activations=activations, **options))


def scores(engine: Engine) -> Tensor:
    (text,) = engine.generate([PROMPT], SCORED)
    assert text.prompt_logprobs is not None
    return torch.tensor([score.logprob for score in text.prompt_logprobs if score is not None])


def simulated(folder: Path, **options: Any) -> Tensor:
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        logits = load(folder, LoadOptions(dtype=torch.float32, impl="reference", **options))(ids).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@pytest.fixture
def dynamic(llama_folder: Path, tmp_path: Path) -> Path:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8-dynamic")
    return tmp_path / "q"


@pytest.fixture
def static(llama_folder: Path, tmp_path: Path) -> Path:
    """A checkpoint of llm-compressor, and a tokenizer."""
    shutil.copytree(INTEROP / "llmc-fp8-static", tmp_path / "static")
    for file in llama_folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "static")
    return tmp_path / "static"


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_declared_inputs_are_quantized_in_prompts_and_not_in_single_tokens(
    kind: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    engine, plain = open_engine(folder), open_engine(folder, "bf16")
    assert (engine.info.activations, plain.info.activations) == ("fp8", "float32")
    assert engine.info.prefill_bytes > 0
    assert plain.info.prefill_bytes == 0
    found, wanted, weight_only = scores(engine), simulated(folder), simulated(folder, weight_only=True)
    torch.testing.assert_close(scores(plain), weight_only, rtol=1e-4, atol=1e-4)
    effect = (wanted - weight_only).abs().mean()
    assert effect > 1e-4
    # codes of inputs between two values may be rounded either way: the engine computes norms in another order
    assert (found - wanted).abs().mean() < 0.1 * effect
    pieces = scores(open_engine(folder, max_num_batched_tokens=ROWS - 1, max_num_seqs=4))
    torch.testing.assert_close(pieces, weight_only, rtol=1e-4, atol=1e-4)


def test_weight_only_checkpoints_have_them_when_asked(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8")
    assert open_engine(tmp_path / "q").info.activations == "float32"
    engine = open_engine(tmp_path / "q", "fp8")
    wanted, weight_only = simulated(tmp_path / "q", weight_only=True, prefill="w8a8"), simulated(tmp_path / "q")
    assert (scores(engine) - wanted).abs().mean() < 0.1 * (wanted - weight_only).abs().mean()


def test_linears_of_one_product_share_the_largest_static_scale(static: Path) -> None:
    runner: Any = open_engine(static)._runner
    (qkv,) = runner._decoder.layers[0].qkv.weights
    with torch.inference_mode():
        model = load(static, LoadOptions(dtype=torch.float32))
    separate = [model.get_submodule(f"model.layers.0.self_attn.{part}_proj").input_scale for part in "qkv"]
    assert qkv.prefill.input_scale == max(separate)


def test_a_model_without_such_weights_says_so(
    llama_folder: Path, dynamic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match="activations fp8: the checkpoint has no quantized weights"):
        open_engine(llama_folder, "fp8")
    quantize_checkpoint(llama_folder, tmp_path / "mxfp4", "mxfp4")
    with pytest.raises(KernelUnavailable, match="activations fp8: no weight of the model can have inputs in FP8"):
        open_engine(tmp_path / "mxfp4", "fp8")
    with pytest.raises(UsageError, match="activations fp8: only GPUs multiply in FP8, and the model goes to cpu"):
        Engine(dynamic, EngineOptions(activations="fp8"))
    monkeypatch.setattr(scaled_mm, "why_not", lambda *_: "compute capability 8.0")
    with caplog.at_level(logging.WARNING, "minifloat"):
        assert open_engine(dynamic).info.activations == "float32"
    assert "inputs stay in 16 bits although they could be FP8: compute capability 8.0" in caplog.text
    with pytest.raises(KernelUnavailable, match=r"in FP8: compute capability 8\.0"):
        open_engine(dynamic, "fp8")
