"""`deterministic`: an answer has the same tokens and log-probabilities, bit for bit, whatever else the engine does."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from modes import each_value

from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.errors import KernelUnavailable, UsageError
from minifloat.kernels import native
from minifloat.quantize.job import quantize_checkpoint
from minifloat.serve.server import start
from minifloat.serve.server.settings import ServerSettings
from minifloat.serve.text import open_text_model

MakeModel = Callable[..., Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0, seed=5)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen3_moe": {},
    "deepseek_v3": {},
}

needs_kernels = pytest.mark.skipif(bool(native.why_unavailable()), reason=native.why_unavailable())


def prompts_of(count: int) -> list[tuple[int, ...]]:
    generator = random.Random(3)
    shared = tuple(generator.randrange(250) for _ in range(33))
    return [shared + tuple(generator.randrange(250) for _ in range(1 + 11 * i % 61)) for i in range(count)]


def answers(engine: Engine, prompts: list[tuple[int, ...]], params: SamplingParams = GREEDY) -> list[Any]:
    return [(text.tokens, text.logprobs) for text in engine.generate(prompts, params)]


def alone(engine: Engine, prompts: list[tuple[int, ...]], params: SamplingParams = GREEDY) -> list[Any]:
    return [answer for prompt in prompts for answer in answers(engine, [prompt], params)]


@needs_kernels
@pytest.mark.parametrize(("name", "scheme"), each_value(list(FAMILIES), ["bf16", "fp8", "mxfp4", "fp8-block"]))
def test_answers_do_not_depend_on_what_else_runs(name: str, scheme: str, make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", name, hidden_size=128, intermediate_size=128, **FAMILIES[name])
    if scheme != "bf16":
        quantize_checkpoint(folder, tmp_path / "out", scheme)
        folder = tmp_path / "out"
    prompts = prompts_of(7)
    engine = Engine(folder, EngineOptions(deterministic=True, prefix_cache=False))
    assert engine.info.deterministic
    assert engine.info.runner == "native"
    expected = alone(engine, prompts)
    assert answers(engine, prompts) == expected
    assert answers(engine, prompts[::-1])[::-1] == expected
    assert (
        alone(Engine(folder, EngineOptions(deterministic=True, max_num_seqs=1, max_num_batched_tokens=7)), prompts)
        == expected
    )
    cached = Engine(folder, EngineOptions(deterministic=True))
    assert answers(cached, prompts) == expected
    assert alone(cached, prompts) == expected
    drafting = Engine(folder, EngineOptions(deterministic=True, speculate="prompt"))
    assert answers(drafting, prompts) == expected
    assert answers(engine, prompts, SAMPLED) == alone(engine, prompts, SAMPLED)


@needs_kernels
def test_it_chooses_the_kernels(llama_folder: Path) -> None:
    chosen, default = (Engine(llama_folder, EngineOptions(deterministic=flag)) for flag in (True, False))
    runners: list[Any] = [chosen._runner, default._runner]
    assert [runner.decoder.batch_invariant for runner in runners] == [True, False]
    text = open_text_model(llama_folder, EngineOptions(deterministic=True))
    assert isinstance(text, Engine)
    assert text.info.deterministic


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "only the native decoder of the CPU has it, and not device cuda"),
        ({"runner": "device"}, "not runner 'device'"),
        ({"runner": "transformers"}, "runner 'transformers' multiplies with torch"),
        ({"impl": "reference"}, "impl 'reference' multiplies with torch"),
        ({"activations": "int8"}, "excludes activations int8"),
    ],
)
def test_what_cannot_promise_it_is_refused(options: dict[str, Any], message: str, llama_folder: Path) -> None:
    with pytest.raises(UsageError, match=f"^deterministic: .*{message}"):
        Engine(llama_folder, EngineOptions(deterministic=True, **options))


@needs_kernels
def test_a_model_of_transformers_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "bloom")
    with pytest.raises(UsageError, match="deterministic: the native decoder of the CPU does not run this model: "):
        Engine(folder, EngineOptions(deterministic=True))
    with pytest.raises(UsageError, match="does not run this model"):
        open_text_model(folder, EngineOptions(deterministic=True))


def test_without_the_native_library_it_is_refused(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_result", native.LoadResult(None, "it was not built"))
    with pytest.raises(KernelUnavailable, match="it was not built"):
        Engine(llama_folder, EngineOptions(deterministic=True))


@needs_kernels
def test_the_log_of_a_server_says_so(llama_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "minifloat.server"):
        start._log_model(Engine(llama_folder, EngineOptions(deterministic=True)).info, ServerSettings("m"))
    assert "deterministic: the same bits whatever else runs, by batch-invariant kernels of " in caplog.text
