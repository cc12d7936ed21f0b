"""Drafts change how many tokens a step gives, never which tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from minifloat.engine import Engine, EngineOptions, Grammar, SamplingParams, drafters, speculation
from minifloat.engine.speculation import SpeculationStats
from minifloat.errors import CheckpointError, UnknownNameError, UsageError
from minifloat.quantize.job import quantize_checkpoint

STORIES = Path(__file__).parents[3] / "examples" / "storybook-4m"
PROMPTS = [
    "Once upon a time there was a little girl named",
    "The dog",
    "Tom saw a big red ball. He wanted the ball. Tom saw a big red",
    "One day, a bird and a cat went to the park. They",
    "A",
]
LENGTH = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=7)
DRAWS = {
    "all tokens": SAMPLED,
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, max_tokens=LENGTH, ignore_eos=True, seed=7),
    "top_k": SamplingParams(temperature=1.2, top_k=20, max_tokens=LENGTH, ignore_eos=True, seed=7),
    "min_p": SamplingParams(min_p=0.05, max_tokens=LENGTH, ignore_eos=True, seed=7),
}


def engine_of(model: Path = STORIES, **options: Any) -> Engine:
    """An engine that always proposes as many drafts as it may, so that a test does not depend on times."""
    engine = Engine(model, EngineOptions(dtype="float32", **{"max_model_len": 256} | options))
    if engine.speculator is not None:
        engine.speculator._fixed = True
    return engine


def tokens(engine: Engine, params: SamplingParams = GREEDY, prompts: list[str] | None = None) -> list[tuple[int, ...]]:
    return [text.tokens for text in engine.generate(PROMPTS if prompts is None else prompts, params)]


def counts(engine: Engine) -> SpeculationStats:
    assert engine.speculator is not None
    return engine.speculator.stats + engine.speculator.last


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    quantize_checkpoint(STORIES, folder, "mxfp4")
    return folder


@pytest.fixture(scope="module")
def greedy() -> list[tuple[int, ...]]:
    return tokens(engine_of())


KINDS = ["self", "prompt", "draft", "draft with a cache of its own"]


def options_of(kind: str, draft: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if kind == "draft with a cache of its own":
        monkeypatch.setattr(drafters, "shares_cache", lambda model, draft: False)
    return {"draft": str(draft)} if kind.startswith("draft") else {"speculate": kind}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        {"max_model_len": 80, "kv_cache_memory": 600_000},
    ],
    ids=["together", "one by one", "in pieces", "preempted"],
)
def test_greedy_text_is_that_of_the_model_alone(
    kind: str, limits: dict[str, Any], mxfp4: Path, greedy: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(draft_tokens=4, **options_of(kind, mxfp4, monkeypatch), **limits)
    assert tokens(engine) == greedy
    stats = counts(engine)
    if kind != "prompt":  # a model that is nearly the same is mostly right, and not always
        assert 0.6 < stats.acceptance < 1.0
        assert stats.tokens_per_step > 3
    assert tokens(engine) == greedy  # prompts from the prefix cache


def test_the_small_cache_preempts(mxfp4: Path) -> None:
    engine = engine_of(speculate="self", draft_tokens=4, max_model_len=80, kv_cache_memory=600_000)
    tokens(engine)
    assert engine._scheduler.preemptions


@pytest.mark.parametrize("name", DRAWS)
def test_sampled_text_does_not_depend_on_who_drafts_and_how_much(name: str, mxfp4: Path) -> None:
    params = DRAWS[name]
    expected = tokens(engine_of(speculate="prompt", draft_tokens=1), params)
    several = engine_of(speculate="self", draft_tokens=5)
    assert tokens(several, params) == expected
    assert 0.4 < counts(several).acceptance < 1.0
    alone = engine_of(draft=str(mxfp4), draft_tokens=2, max_num_seqs=1)
    assert tokens(alone, params) == expected
    assert len(set(expected)) == len(expected)


def test_drafts_of_a_model_that_knows_nothing_are_rejected_and_change_nothing(
    greedy: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        name, weight_bytes, memory = "prompt", 0, 0

        def propose(self, sequences: Any, counts: list[int]) -> list[tuple[int, ...]]:
            return [(3,) * count for count in counts]

        def release(self, sequence: Any) -> None:
            pass

    engine = engine_of(speculate="prompt", draft_tokens=6)
    assert engine.speculator is not None
    engine.speculator.drafter = Wrong()
    assert tokens(engine) == greedy
    assert counts(engine).draft_tokens > LENGTH
    assert counts(engine).acceptance < 0.1


def test_a_failing_draft_costs_the_drafts_and_not_the_texts(
    greedy: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(speculate="prompt")
    assert engine.speculator is not None

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(engine.speculator.drafter, "propose", fail)
    assert tokens(engine) == greedy


def test_texts_end_where_they_would_without_drafts() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, stop=(" the", "."), logprobs=3)
    plain, drafted = engine_of(), engine_of(speculate="self", draft_tokens=6)
    for expected, found in zip(plain.generate(PROMPTS, params), drafted.generate(PROMPTS, params), strict=True):
        assert (found.text, found.tokens, found.finish_reason) == (
            expected.text,
            expected.tokens,
            expected.finish_reason,
        )
        assert found.stop_reason == expected.stop_reason
        assert found.logprobs is not None
        assert expected.logprobs is not None
        assert [entry.token for entry in found.logprobs] == [entry.token for entry in expected.logprobs]
        for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert found.usage == expected.usage


@pytest.mark.parametrize(
    "extra",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": {5: 3.0}},
        {"min_tokens": 5},
        {"grammar": Grammar.json_object()},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_requests_whose_logits_depend_on_their_tokens_get_no_drafts(extra: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, **extra)
    plain, drafted = engine_of(), engine_of(speculate="self")
    assert tokens(drafted, params, PROMPTS[:2]) == tokens(plain, params, PROMPTS[:2])
    assert counts(drafted).drafts == 0


def test_log_probabilities_of_prompts_are_those_without_drafts() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10, prompt_logprobs=2)
    plain, drafted = engine_of(), engine_of(speculate="self")
    for expected, found in zip(plain.generate(PROMPTS, params), drafted.generate(PROMPTS, params), strict=True):
        assert found.tokens == expected.tokens
        assert found.prompt_logprobs is not None
        assert expected.prompt_logprobs is not None
        assert [entry and entry.token for entry in found.prompt_logprobs] == [
            entry and entry.token for entry in expected.prompt_logprobs
        ]


def test_the_copy_takes_a_quarter_of_the_model_and_shares_the_rest() -> None:
    engine = engine_of(speculate="self")
    model = engine._runner.decoder  # type: ignore[attr-defined]
    assert engine.speculator is not None
    draft = engine.speculator.drafter._runner.decoder  # type: ignore[attr-defined]
    assert draft.embedding is model.embedding
    assert draft.layers[0].input_norm is model.layers[0].input_norm
    linears = sum(weight.nbytes for layer in model.layers for weight in layer.mlp.gate_up)
    copies = sum(weight.nbytes for layer in draft.layers for weight in layer.mlp.gate_up)
    assert 0.25 < copies / linears < 0.4  # pages and panels are padded
    assert engine.info.speculation == "self"
    assert 0 < engine.info.draft_bytes < engine.info.step_bytes


def test_a_draft_model_with_an_fp8_cache_uses_the_scales_of_the_model(tmp_path: Path, make_llama: Any) -> None:
    quantize_checkpoint(STORIES, tmp_path / "fp8", "fp8-dynamic")
    plain = tokens(engine_of(tmp_path / "fp8"))
    assert tokens(engine_of(tmp_path / "fp8", speculate="self", draft_tokens=3)) == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "self", "runner": "transformers"}, "only the native decoder of the CPU verifies drafts"),
        ({"speculate": "draft"}, "needs the folder of a draft model"),
        ({"speculate": "prompt", "draft": "x"}, "goes with speculate='draft', not with 'prompt'"),
        ({"speculate": "self", "draft_tokens": 0}, "draft_tokens: expected at least 1, got 0"),
    ],
    ids=["runner", "no folder", "two kinds", "no drafts"],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Engine(STORIES, EngineOptions(dtype="float32", **options))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="speculate"):
        Engine(STORIES, EngineOptions(speculate="magic"))


def test_a_model_of_four_bits_has_no_cheaper_copy(mxfp4: Path) -> None:
    with pytest.raises(UsageError, match="four bits already"):
        Engine(mxfp4, EngineOptions(speculate="self"))


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path, make_llama: Any) -> None:
    with pytest.raises(UsageError, match="another vocabulary than the model"):
        Engine(STORIES, EngineOptions(draft=str(make_llama(tmp_path / "other"))))


def test_a_model_or_draft_that_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        Engine(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="no such folder"):
        Engine(STORIES, EngineOptions(dtype="float32", draft=str(tmp_path / "missing")))


def test_a_draft_that_the_decoder_does_not_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    shutil.copytree(STORIES, tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    config = json.loads(path.read_text()) | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    config.pop("rope_parameters", None)
    path.write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"draft: the native decoder does not run .*dynamic"):
        Engine(STORIES, EngineOptions(dtype="float32", draft=str(tmp_path / "draft")))


def test_a_draft_that_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    monkeypatch.setattr(drafters, "available_memory", lambda: 1 << 10)
    with pytest.raises(UsageError, match=r"the copy of the model in MXFP4 takes \d+ MiB, and 0 MiB are free"):
        drafters.open_drafter(
            drafters.EngineOptions(speculate="self"), engine._runner, engine.tokenizer, lambda folder: None
        )  # type: ignore[arg-type,return-value]


def test_steps_that_compute_prompts_have_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    propose = speculation.Speculator.propose

    def spy(self: Any, items: Any) -> Any:
        result = propose(self, items)
        seen.append(result)
        return result

    monkeypatch.setattr(speculation.Speculator, "propose", spy)
    tokens(engine_of(speculate="self", max_num_batched_tokens=9, max_num_seqs=5))
    mixed = [items for items in seen if any(item.end - len(item.drafts) - item.start > 1 for item in items)]
    assert mixed
    assert not any(item.drafts for items in mixed for item in items)
    assert any(item.drafts for items in seen for item in items)
