"""Log-probabilities of prompts are those of transformers on the whole prompt, however the engine comes by them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Recorder

from minifloat.engine import (
    Engine,
    EngineListener,
    EngineOptions,
    GeneratedText,
    Request,
    SamplingParams,
    TokenLogprob,
)
from minifloat.engine.sampling import NonFiniteLogits
from minifloat.engine.steps import score
from minifloat.errors import ContextLengthError, UsageError
from minifloat.model.runtime.load import LoadOptions, load

RUNNERS = ["native", "device", "transformers"]
ALTERNATIVES = 3
SCORED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=ALTERNATIVES)
PLAIN = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights large enough that some tokens are much more probable than others."""
    return make_llama(tmp_path_factory.mktemp("scored") / "llama", initializer_range=0.3)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    generator = random.Random(5)
    lengths = [1, 2, 16, 17, 33, 60, 48, 5, 31, 57]
    return [tuple(generator.randrange(250) for _ in range(length)) for length in lengths]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Of each prompt ``[tokens, vocab]``: what transformers says of the token after each."""
    model: Any = load(folder, LoadOptions(dtype=torch.float32, impl="reference"))
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in prompts]


def check(prompt: tuple[int, ...], found: tuple[TokenLogprob | None, ...] | None, wanted: torch.Tensor) -> None:
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    for place, one in enumerate(found[1:]):
        assert one is not None
        assert one.token == prompt[place + 1]
        assert one.logprob == pytest.approx(float(wanted[place, one.token]), abs=TOLERANCE)
        values, ids = wanted[place].topk(ALTERNATIVES)
        assert [top.logprob for top in one.top] == pytest.approx(values.tolist(), abs=TOLERANCE)
        for top, token in zip(one.top, ids.tolist(), strict=True):  # two of nearly the same value may change places
            assert top.token == token or abs(float(wanted[place, top.token] - wanted[place, token])) < TOLERANCE


def check_all(completions: list[GeneratedText], expected: list[torch.Tensor]) -> None:
    for completion, wanted in zip(completions, expected, strict=True):
        check(completion.prompt, completion.prompt_logprobs, wanted)


def engine_of(folder: Path, runner: str, observer: EngineListener | None = None, **options: Any) -> Engine:
    engine = Engine(
        folder, EngineOptions(**{"dtype": "float32", "runner": runner, "max_num_seqs": 6} | options), observer=observer
    )
    assert engine.info.runner == runner
    return engine


@pytest.mark.parametrize("runner", RUNNERS)
def test_prompt_logprobs_are_those_of_transformers_alone_together_and_repeated(
    runner: str, folder: Path, prompts: list[tuple[int, ...]], expected: list[torch.Tensor]
) -> None:
    engine = engine_of(folder, runner)
    check_all(engine.generate(prompts[4:5], SCORED), expected[4:5])
    answers = [completion.tokens for completion in engine.generate(prompts, PLAIN)]  # now the prefix cache is warm
    scored = engine.generate(prompts, SCORED)
    check_all(scored, expected)
    assert [completion.usage.cached_tokens for completion in scored] == [0] * len(prompts)
    assert [completion.tokens for completion in scored] == [answer[:6] for answer in answers]
    again = engine.generate(prompts, PLAIN)
    assert [completion.tokens for completion in again] == answers
    assert all(completion.prompt_logprobs is None for completion in again)


@pytest.mark.parametrize("runner", RUNNERS)
def test_prompt_logprobs_are_the_same_in_pieces_beside_other_requests(
    runner: str, folder: Path, prompts: list[tuple[int, ...]], expected: list[torch.Tensor]
) -> None:
    engine = engine_of(folder, runner, max_num_batched_tokens=11)
    alone = [completion.tokens for completion in engine.generate(prompts, PLAIN)]
    found: dict[str, list[Any]] = {}
    for index, prompt in enumerate(prompts):
        engine.add(Request(f"scored {index}", prompt, SCORED))
        engine.add(Request(f"plain {index}", prompt, PLAIN))
    while engine.has_work:
        for delivery in engine.step():
            found.setdefault(delivery.request_id, []).append(delivery)
    for index, (prompt, wanted) in enumerate(zip(prompts, expected, strict=True)):
        first, *others = found[f"scored {index}"]
        check(prompt, first.prompt_logprobs, wanted)
        assert len(first.tokens) == 1
        assert all(delivery.prompt_logprobs is None for delivery in (*others, *found[f"plain {index}"]))
        assert tuple(token for delivery in found[f"plain {index}"] for token in delivery.tokens) == alone[index]


@pytest.mark.parametrize("runner", RUNNERS)
def test_prompt_logprobs_are_reported_once_after_a_preemption(
    runner: str, folder: Path, prompts: list[tuple[int, ...]], expected: list[torch.Tensor]
) -> None:
    recorder = Recorder()
    memory = engine_of(folder, runner).info.kv_bytes_per_token * 16 * 9
    engine = engine_of(
        folder, runner, kv_cache_memory=memory, max_model_len=100, max_num_batched_tokens=13, observer=recorder
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, prompt_logprobs=ALTERNATIVES)
    check_all(engine.generate(prompts, params), expected)
    assert recorder.preemptions > 0
    assert engine.kv_usage == 0.0


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_prompt_can_be_all_that_is_asked_for(
    runner: str, folder: Path, prompts: list[tuple[int, ...]], expected: list[torch.Tensor]
) -> None:
    recorder = Recorder()
    engine = engine_of(folder, runner, max_model_len=60, observer=recorder)
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=ALTERNATIVES)
    completions = engine.generate(prompts, params)  # one of them fills the context
    check_all(completions, expected)
    assert {(completion.tokens, completion.text, completion.finish_reason) for completion in completions} == {
        ((), "", "length")
    }
    assert (sum(step.generation_tokens for step in recorder.steps), recorder.first) == (0, [])
    # The last token is predicted and not computed, so one more fits.
    (longer,) = engine.generate([(*prompts[5], 1)], params)
    assert longer.prompt_logprobs is not None
    last = longer.prompt_logprobs[-1]
    assert last is not None
    assert last.logprob == pytest.approx(float(expected[5][-1, 1]), abs=TOLERANCE)
    with pytest.raises(ContextLengthError):
        engine.generate([(*prompts[5], 1, 1)], params)


@pytest.mark.parametrize("runner", RUNNERS)
def test_tokens_before_the_first_that_is_scored_come_from_the_cache(
    runner: str, folder: Path, prompts: list[tuple[int, ...]], expected: list[torch.Tensor]
) -> None:
    engine = engine_of(folder, runner)
    prompt, wanted = prompts[5], expected[5]
    for start, cached in ((40, 0), (40, 32), (32, 16), (33, 32), (59, 48), (1, 0)):
        params = SamplingParams(
            temperature=0.0, max_tokens=0, prompt_logprobs=ALTERNATIVES, prompt_logprobs_start=start
        )
        (found,) = engine.generate([prompt], params)
        assert found.prompt_logprobs is not None
        assert found.prompt_logprobs[:start] == (None,) * start
        places = range(start, len(prompt))
        assert [one and one.token for one in found.prompt_logprobs[start:]] == list(prompt[start:])
        assert [one and one.logprob for one in found.prompt_logprobs[start:]] == pytest.approx(
            [float(wanted[place - 1, prompt[place]]) for place in places], abs=TOLERANCE
        )
        assert found.usage.cached_tokens == (cached if runner != "transformers" else 0)
    with pytest.raises(UsageError, match="prompt_logprobs_start: expected less than the 60 tokens of the prompt"):
        engine.generate([prompt], replace(params, prompt_logprobs_start=60))
    with pytest.raises(UsageError, match="prompt_logprobs_start: expected at least 1"):
        replace(params, prompt_logprobs_start=0)


def test_a_step_takes_only_so_many_of_them(
    folder: Path, prompts: list[tuple[int, ...]], expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folder, "native")
    monkeypatch.setattr(engine._scheduler, "max_scored_tokens", 7)
    rows: list[int] = []
    run = engine._runner.run

    def counted(works: Any) -> torch.Tensor:
        rows.append(sum(work.scored for work in works))
        return run(works)

    monkeypatch.setattr(engine._runner, "run", counted)
    check_all(engine.generate(prompts, SCORED), expected)
    assert max(rows) == 7
    assert sum(rows) == sum(len(prompt) - 1 for prompt in prompts)


def test_a_prompt_that_cannot_be_scored_ends_alone(folder: Path, prompts: list[tuple[int, ...]]) -> None:
    engine = engine_of(folder, "transformers")
    model: Any = engine._runner
    forward = model._model.forward

    def broken(**inputs: Any) -> Any:
        output = forward(**inputs)
        if inputs["input_ids"][0, 0] == prompts[3][0]:
            output.logits[:, :1] = torch.nan
        return output

    model._model.forward = broken
    deliveries = list(engine.generate(prompts[2:5], SCORED, stream=True))
    last = {delivery.request_id: delivery for delivery in deliveries if delivery.finish_reason}
    assert {name: delivery.finish_reason for name, delivery in last.items()} == {
        "0": "length",
        "1": "error",
        "2": "length",
    }
    assert "not finite" in str(last["1"].error)


def test_tokens_that_cannot_be_are_minus_infinity_and_nan_is_an_error() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    (choice,) = score(logits, [1], 2)
    assert choice.logprob == -torch.inf
    assert [token for token, _ in choice.top] == [2, 0]
    assert score(logits, [2], 0)[0].top == ()
    for bad in (torch.nan, torch.inf):
        with pytest.raises(NonFiniteLogits):
            score(torch.tensor([[0.0, bad]]), [0], 1)


@pytest.mark.parametrize("runner", RUNNERS)
def test_logits_of_a_text_are_those_of_transformers_whatever_ran_before(
    runner: str, folder: Path, prompts: list[tuple[int, ...]], expected: list[torch.Tensor]
) -> None:
    engine = engine_of(folder, runner, max_num_batched_tokens=13, max_model_len=60)
    answers = engine.generate(prompts[:5], PLAIN)
    for prompt, wanted in zip(prompts, expected, strict=True):
        parts = list(engine.logits(prompt))
        assert {len(part) for part in parts[:-1]} <= {13}
        torch.testing.assert_close(torch.cat(parts).log_softmax(-1), wanted, atol=TOLERANCE, rtol=0)
    for begun in engine.logits(prompts[5]):
        assert len(begun) == 13
        break
    assert (engine.kv_usage, [each.tokens for each in engine.generate(prompts[:5], PLAIN)]) == (
        0.0,
        [each.tokens for each in answers],
    )
    for wrong, message in (((), "expected 1 .. 60 tokens"), ((1,) * 61, "got 61"), ((-1,), "token ids of 0 .. ")):
        with pytest.raises(UsageError, match=message):
            engine.logits(wrong)
    engine.add(Request("0", prompts[0], PLAIN))
    with pytest.raises(UsageError, match="unfinished requests"):
        engine.logits(prompts[0])


@pytest.mark.parametrize("runner", RUNNERS)
def test_logits_of_texts_are_those_of_each_text_and_short_texts_share_a_step(
    runner: str, folder: Path, prompts: list[tuple[int, ...]], expected: list[torch.Tensor]
) -> None:
    engine = engine_of(folder, runner, max_num_batched_tokens=64, max_model_len=60, max_num_seqs=3)
    steps = list(engine.logits_of_each(prompts))
    assert sum(map(len, steps)) == sum(map(len, prompts))
    assert len(steps) < len(prompts)
    torch.testing.assert_close(torch.cat(steps).log_softmax(-1), torch.cat(expected), atol=TOLERANCE, rtol=0)
    assert engine.kv_usage == 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_logits_that_overwrite_each_other_are_the_same_and_take_no_more_memory(
    runner: str, folder: Path, prompts: list[tuple[int, ...]]
) -> None:
    engine = engine_of(folder, runner, max_num_batched_tokens=64, max_model_len=60, max_num_seqs=3)
    apart = list(engine.logits_of_each(prompts))
    for _ in range(2):
        addresses = set()
        for rows, wanted in zip(engine.logits_of_each(prompts, overwrite=True), apart, strict=True):
            assert torch.equal(rows, wanted)
            addresses.add(rows.data_ptr())
    assert len(addresses) == 1 or runner != "native"
    assert len({rows.data_ptr() for rows in apart}) == len(apart)
