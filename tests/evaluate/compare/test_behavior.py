"""`compare --behavior`: figures, verdict, and answers by the engine and by servers, with toys and with said answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from comparing import compare_models, compare_served
from comparisons import make_behavior, make_candidate, make_comparison, make_summary
from fake_engine import INFO, FakeEngine
from serving import MODEL, running

from minifloat.commands.main import main
from minifloat.engine import Engine, EngineOptions, Request
from minifloat.errors import DataError, UsageError
from minifloat.evaluate.compare import behavior_answers, words
from minifloat.evaluate.compare import run as compare_run
from minifloat.evaluate.compare.behavior import Answer, Answers, PromptNames, behavior_of
from minifloat.evaluate.compare.behavior_answers import engine_answers, served_answers
from minifloat.evaluate.compare.behavior_prompts import Prompts
from minifloat.evaluate.compare.document import document
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.verdict import Outcome, Verdict, judge
from minifloat.model.runtime.tokenizer import load_tokenizer
from minifloat.report import html
from minifloat.serve.client import Connection, ServerError

MakeModel = Callable[..., Path]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
HERMES = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{# <tool_call> </think> #}" + TEMPLATE
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %s}}\n</tool_call>'
ALIKE = {"window": 32, "dtype": "float32"}


def written(folder: Path, count: int = 40, **fields: Any) -> str:
    """A file of prompts to which no call is right, or what `fields` say."""
    path = folder / "agent.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"{n} + 2?"}], "tools": [ADD], "expected": []} | fields
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


# ------------------------------------------------------------------------------------------------- figures and verdict


def judged(good: Sequence[tuple[bool, bool]], **tolerance: float) -> Verdict:
    return judge([make_summary(damage=0.1)], Tolerance(**tolerance), behavior=make_behavior(good))


BOTH, LOST, WON, NONE = (True, True), (True, False), (False, True), (False, False)


def test_shares_and_agreement_are_counted_prompt_by_prompt() -> None:
    found = make_behavior([BOTH] * 30 + [LOST] * 6 + [WON] + [NONE] * 3)
    good, functions = found.shares
    assert (good.quantity, functions.quantity) == ("good answers", "right functions")
    assert replace(functions, quantity="good answers") == good
    assert (good.prompts, good.baseline, good.candidate, good.better, good.worse) == (40, 36, 31, 1, 6)
    assert good.difference.value == pytest.approx(-5 / 40)
    assert good.difference.low < -5 / 40 < good.difference.high < 0.05
    assert [(row.quantity, row.same, row.prompts) for row in found.agreement] == [
        ("same functions", 33, 40),
        ("same arguments", 33, 40),
    ]
    assert [pair.change for pair in found.examples] == ["worse"] * 6 + ["better"]
    assert found.thinking is None


def test_equal_answers_have_an_interval_that_reaches_to_what_40_prompts_may_hide() -> None:
    difference = make_behavior([BOTH] * 40).good.difference
    assert (difference.value, difference.low, difference.high) == (
        0,
        pytest.approx(-0.0876, abs=1e-4),
        pytest.approx(0.0876, abs=1e-4),
    )


@pytest.mark.parametrize(
    ("good", "outcome"),
    [
        ([BOTH] * 40, Outcome.PASSED),
        ([BOTH] * 34 + [LOST] + [WON] + [NONE] * 4, Outcome.PASSED),
        ([BOTH] * 38 + [LOST] * 2, Outcome.UNDECIDED),
        ([BOTH] * 22 + [LOST] * 18, Outcome.FAILED),
        ([BOTH] * 22 + [WON] * 18, Outcome.PASSED),
        ([BOTH] * 14 + [NONE] * 26, Outcome.UNDECIDED),
        ([NONE] * 40, Outcome.UNDECIDED),
        ([BOTH] * 7, Outcome.UNDECIDED),
    ],
)
def test_a_candidate_that_behaves_worse_fails(good: list[tuple[bool, bool]], outcome: Outcome) -> None:
    assert judged(good).outcome is outcome


def test_what_is_missing_for_a_pass_is_said_in_prompts() -> None:
    for good, reason, more in (
        ([BOTH] * 38 + [LOST] * 2, "the bound lies in the interval", 40),
        ([BOTH] * 10 + [NONE] * 30, "a pass needs 15 prompts that the baseline answers well", 20),
    ):
        (check,) = judged(good).unmet
        text = words.check_text(check)
        assert text.startswith("good answers lost ")
        assert "on 40 prompts (at most 10% is allowed, 11% with the margin)" in text
        assert reason in text
        assert text.endswith("more prompts would decide")
        assert check.tokens_needed is not None
        assert check.tokens_needed >= 40 + more
    assert "too few prompts for an interval" in words.check_text(judged([BOTH] * 7).unmet[0])


def test_a_kind_of_prompts_that_is_broken_fails_though_all_together_do_not() -> None:
    marks = [{"right functions": True}] * 480 + [{"valid JSON": True}] * 20
    broken = [mark if "valid JSON" not in mark else {"valid JSON": False} for mark in marks]
    names = ("",) * 500
    behavior = behavior_of(
        PromptNames("f", "", 9, names, names, (True,) * 480 + (False,) * 20),
        *(Answers(name, tuple(Answer("", (), m, 0, False) for m in of)) for name, of in (("b", marks), ("c", broken))),
    )
    verdict = judge([make_summary(damage=0.1)], Tolerance(), behavior=behavior)
    assert verdict.outcome is Outcome.FAILED
    assert [check.quantity for check in verdict.unmet] == ["valid JSON lost"]
    assert behavior.good.difference.value == pytest.approx(-0.04)
    assert [check.quantity for check in judged([BOTH] * 40).checks][3:] == ["good answers lost"]


def test_the_length_of_thinking_is_compared_prompt_by_prompt() -> None:
    def answers(*lengths: int | None) -> Answers:
        return Answers("m", tuple(Answer("", (), {}, length, False) for length in lengths))

    prompts = PromptNames("f", "", 9, ("",) * 9, ("",) * 9, (True,) * 9)
    longer = behavior_of(prompts, answers(*range(10, 19)), answers(*range(15, 24))).thinking
    assert longer is not None
    assert (longer.baseline, longer.candidate, longer.change.value) == (14, 19, 5)
    assert behavior_of(prompts, answers(*[0] * 9), answers(*[0] * 9)).thinking is None
    assert behavior_of(prompts, answers(*[1] * 9), answers(*[1] * 8, None)).thinking is None


def test_the_report_says_shares_bounds_and_answers_that_differ() -> None:
    behavior = make_behavior([BOTH] * 22 + [LOST] * 18)
    summary = make_summary(damage=0.1)
    candidate = replace(
        make_candidate(),
        texts=(summary,),
        overall=summary,
        behavior=behavior,
        verdict=judge([summary], Tolerance(), behavior=behavior),
    )
    comparison = make_comparison(candidate)
    page = html.write(document(comparison))
    for text in ("Tools and schemas", "good answers lost at most 10% of the prompts", "Answers that differ", "0 : 18"):
        assert text in page
    assert comparison.to_dict()["candidates"][0]["behavior"]["shares"][0]["worse"] == 18
    assert words.verdict_line(candidate).startswith("FAILED: good answers lost 45% ")


# ------------------------------------------------------------------------------------------------- answers


class Said(FakeEngine):
    """An engine that says a text, by itself or under a server."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        said = tokenizer(text, add_special_tokens=False).input_ids
        super().__init__(tokenizer, says=lambda request: said)
        self.info = replace(INFO, max_model_len=8192)

    def generate(self, prompts: Sequence[Any], params: Sequence[Any], stream: bool) -> Iterator[Any]:
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            self.add(self.begin(Request(str(index), prompt, each)))
        while self.has_work:
            yield from self.step()


@pytest.fixture(scope="module")
def tokenizer(llama_folder: Path) -> Any:
    loaded = load_tokenizer(llama_folder)
    loaded.chat_template = HERMES
    return loaded


@contextlib.contextmanager
def served(engine: Any) -> Iterator[Connection]:
    with running(engine) as client:
        yield Connection(client.url)


@pytest.mark.parametrize("way", ["engine", "server"])
def test_an_answer_is_parsed_on_both_ways(tokenizer: Any, tmp_path: Path, way: str) -> None:
    prompts = Prompts.read(written(tmp_path, 2, expected=[{"name": "add", "arguments": {"a": 1}}]), 500)
    engine: Any = Said(tokenizer, f"<think>Hm, well.</think>I add.\n{CALL % 1}")
    if way == "engine":
        found = engine_answers(engine, "m", prompts, None)
    else:
        with served(engine) as connection:
            found = served_answers(connection, MODEL, prompts, None)
    assert found.tool_format == "hermes"
    for answer in found.answers:
        assert answer.marks == {"valid calls": True, "right functions": True, "right arguments": True}
        assert (answer.said, answer.cut_off) == ('I add.\nadd({"a": 1})', False)
        assert answer.prompt_tokens is not None
        assert answer.thinking_tokens
    assert all(request.params.temperature == 0 and request.params.grammar is None for request in engine.requests)


def test_a_server_that_behaves_worse_is_told(tokenizer: Any, tmp_path: Path) -> None:
    prompts = Prompts.read(written(tmp_path, expected=[{"name": "add"}]), 500)
    found = []
    for text in (CALL % 1, CALL % '"x"', "Three."):
        with served(Said(tokenizer, text)) as connection:
            found.append(served_answers(connection, MODEL, prompts, None))
    for candidate, outcome in zip(found, (Outcome.PASSED, Outcome.FAILED, Outcome.FAILED), strict=True):
        behavior = behavior_answers.behavior(prompts, found[0], candidate, notes := [])
        assert judge([make_summary(damage=0.1)], Tolerance(), behavior=behavior).outcome is outcome
        assert not notes


def test_a_prompt_that_a_server_refuses_is_named(tokenizer: Any, tmp_path: Path) -> None:
    prompts = Prompts.read(written(tmp_path, 1, name="sum"), 9000)
    with served(Said(tokenizer, "x")) as connection, pytest.raises(ServerError, match="sum: 400: max_tokens"):
        served_answers(connection, MODEL, prompts, None)


@pytest.fixture(scope="module")
def toys(make_llama: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two toys of which no answer holds a call, and whose template has no tools."""
    folder = tmp_path_factory.mktemp("behavior")
    made = [
        make_llama(folder / str(seed), initializer_range=0.3, max_position_embeddings=2048, seed=seed)
        for seed in (0, 1)
    ]
    for each in made:
        (each / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text("The quick brown fox jumps over the lazy dog; naïve café. " * 12, encoding="utf-8")
    return path


def test_the_engine_answers_as_the_server_does(toys: list[Path], tmp_path: Path) -> None:
    prompts = Prompts.read(written(tmp_path, 3), 16)
    engine = Engine(toys[0], EngineOptions(dtype="float32", max_num_seqs=4, kv_cache_memory=16 << 20))
    alone = engine_answers(engine, MODEL, prompts, None)
    with served(engine) as connection:
        found = served_answers(connection, MODEL, prompts, None)
    assert found.answers == alone.answers
    assert {answer.cut_off for answer in found.answers} == {True}
    assert found.tool_format == alone.tool_format == "generic"


def test_behavior_is_part_of_the_verdict_and_of_the_report(toys: list[Path], tmp_path: Path, text: Path) -> None:
    arguments = ["compare", str(toys[0]), str(toys[0]), "--data", str(text), "--dtype", "float32", "--window", "32"]
    arguments += ["--prompts", "0", "--behavior", written(tmp_path), "--behavior-tokens", "4"]
    page = tmp_path / "page.html"
    result = CliRunner().invoke(main, [*arguments, "--report", str(page), "--no-report"])
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    assert "behavior, prompts of agent.jsonl: good answers 40 -> 40 of 40, difference 0.0 pp [-8.8, 8.8]" in output
    assert "the chat template has no tools" in output
    assert "good answers lost 0.0% [-8.8, 8.8] on 40 prompts" in output
    assert "Tools and schemas" in page.read_text(encoding="utf-8")
    strict = CliRunner().invoke(main, [*arguments, "--no-report", "--max-behavior-loss", "5%"])
    assert strict.exit_code == 3
    assert "more prompts would decide" in " ".join(strict.output.split())


def test_a_candidate_that_calls_where_it_should_not_fails(
    toys: list[Path], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(engine: Any, name: str, prompts: Prompts, progress: Any) -> Answers:
        calls = (("add", "{}"),) if name.endswith("copy") else ()
        return Answers(
            name, tuple(Answer("", calls, {"right functions": not calls}, None, False) for _ in prompts.prompts)
        )

    (tmp_path / "copy").symlink_to(toys[0])
    monkeypatch.setattr(behavior_answers, "engine_answers", answered)
    result = compare_models(toys[0], tmp_path / "copy", [text], behavior=written(tmp_path), **ALIKE)
    assert result.outcome is Outcome.FAILED
    assert {check.counted for check in result.candidates[0].verdict.unmet} == {"prompts"}


def test_models_that_do_not_fit_together_answer_one_after_the_other(
    toys: list[Path], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**ALIKE, "behavior": written(tmp_path, 8), "behavior_tokens": 4}
    together = compare_models(toys[0], toys[1:], [text], **options).candidates[0]
    monkeypatch.setattr(compare_run, "fits_together", lambda *_: False)
    alone = compare_models(toys[0], toys[1:], [text], **options).candidates[0]
    assert alone.behavior is not None
    assert (alone.behavior, alone.verdict) == (together.behavior, together.verdict)


def test_a_served_model_and_a_served_baseline_are_compared(toys: list[Path], tmp_path: Path, text: Path) -> None:
    options = {**ALIKE, "behavior": written(tmp_path, 8), "behavior_tokens": 4}
    engine = Engine(toys[0], EngineOptions(dtype="float32", max_num_seqs=4, kv_cache_memory=16 << 20))
    with running(engine) as client:
        local = compare_served(toys[0], client.url, [text], **options).candidates[0].behavior
        both = compare_served(toys[0], client.url, [text], baseline_url=client.url, **options).candidates[0].behavior
    assert local is not None
    assert local == both
    assert local.agreement[1].same == 8


def test_prompts_that_differ_are_noted(toys: list[Path], tmp_path: Path, text: Path, make_llama: MakeModel) -> None:
    other = make_llama(tmp_path / "other", max_position_embeddings=2048)
    (other / "chat_template.jinja").write_text(f"Hello. {TEMPLATE}")
    found = compare_models(toys[0], other, [text], behavior=written(tmp_path, 8), behavior_tokens=2, **ALIKE)
    assert any("8 of 8 prompts have another number of tokens" in note for note in found.notes)


def test_what_cannot_answer_is_refused_before_text_is_scored(
    toys: list[Path], tmp_path: Path, text: Path, make_llama: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, file = make_llama(tmp_path / "plain", max_position_embeddings=2048), written(tmp_path, 8)
    with pytest.raises(UsageError, match="--behavior needs a chat template, and this model has none"):
        compare_models(plain, plain, [text], behavior=file, **ALIKE)
    long = [{"role": "user", "content": "x" * 3000}]
    with pytest.raises(DataError, match=r"--behavior, line 1: prompt: [0-9]+ tokens and 1 more do not fit the context"):
        compare_models(toys[0], toys[0], [text], behavior=written(tmp_path, 8, messages=long), **ALIKE)
    with pytest.raises(DataError, match="absent: no such file; --behavior takes a file of JSON Lines, or builtin"):
        compare_models(toys[0], toys[0], [text], behavior="absent", **ALIKE)
    monkeypatch.setattr(compare_run, "_why_no_engine", lambda *_: "of this test")
    with pytest.raises(
        UsageError, match=r"only minifloat's engine answers .* not run these models: of this test; leave"
    ):
        compare_models(toys[0], toys[0], [text], behavior=written(tmp_path, 8), **ALIKE)


def test_a_model_that_is_taken_for_the_file_is_told(toys: list[Path]) -> None:
    result = CliRunner().invoke(main, ["compare", "--behavior", *map(str, toys)])
    assert result.exit_code == 2
    assert "is a folder; name a file, or put the option behind the models" in " ".join(result.output.split())


def test_a_served_baseline_needs_a_served_candidate_and_prompts(toys: list[Path]) -> None:
    for more in (["--served", "http://127.0.0.1:9"], [str(toys[1]), "--behavior"]):
        result = CliRunner().invoke(main, ["compare", str(toys[0]), *more, "--served-baseline", "http://127.0.0.1:9"])
        assert result.exit_code == 2
        assert "--served-baseline answers the prompts of --behavior beside --served" in " ".join(result.output.split())
