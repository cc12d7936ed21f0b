"""Grammars are computed in threads with limits; texts that wait for them hold up no others."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from engines import run

from minifloat.engine import Engine, EngineOptions, Grammar, Request, SamplingParams
from minifloat.engine.grammar import GrammarLimits, Grammars, GrammarState
from minifloat.errors import QueueFull, UsageError
from minifloat.model.runtime.tokenizer import serving_tokenizer

#: Valid JSON Schema; llguidance reaches a limit after the first token.
ENDLESS = {"type": "object", "properties": {"child": {"$ref": "#"}}, "required": ["child"]}
SECONDS = 60.0
#: Limits of one attack: seconds of processor time, bytes, and seconds that another thread may be late.
MOST_SECONDS, MOST_MEMORY, MOST_DELAY, ATTEMPTS = 3.0, 256 << 20, 0.1, 5


def pattern(text: str) -> Grammar:
    return Grammar.json_schema({"type": "string", "pattern": f"^{text}$"})


def allowed(state: GrammarState, vocab: int) -> list[int]:
    """The tokens that may follow."""
    state.grammars.wait([state], SECONDS)
    logits = np.zeros(vocab, dtype=np.float32)
    state.forbid(logits)
    return np.flatnonzero(np.isfinite(logits)).tolist()


class Case:
    """A tokenizer with one token per byte, and grammars for it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = serving_tokenizer(folder)
        self.vocab = len(self.tokenizer.backend.get_vocab())
        self._made: list[Grammars] = []

    def grammars(self, **limits: Any) -> Grammars:
        end = [self.tokenizer.eos_token_id]
        made = Grammars(self.tokenizer, self.vocab, end, GrammarLimits(**limits))
        self._made.append(made)
        return made

    def begin(self, grammars: Grammars, grammar: Grammar) -> GrammarState:
        state = grammars.begin(grammar)
        state.ready.result(SECONDS)
        return state

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def close(self) -> None:
        for grammars in self._made:
            grammars.close()


@pytest.fixture
def case(llama_folder: Path) -> Iterator[Case]:
    made = Case(llama_folder)
    yield made
    made.close()


def nap(until: threading.Event) -> float:
    """Sleep again and again until an event; return by how much the longest sleep was too long."""
    longest = 0.0
    while not until.is_set():
        started = time.perf_counter()
        time.sleep(0.001)
        longest = max(longest, time.perf_counter() - started)
    return longest


ATTACKS: dict[str, dict[str, Any]] = {
    "counted repetition": {"type": "string", "pattern": "^a{1000000000}$"},
    "nested repetition": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
    "options": {"type": "string", "pattern": "^" + "a?" * 30_000 + "$"},
    "options and letters": {"type": "string", "pattern": "^" + "a?" * 3_000 + "a" * 3_000 + "$"},
    "stars": {"type": "string", "pattern": "^" + "(a|b)*" * 9_000 + "$"},
    "stars in stars": {"type": "string", "pattern": "(a*)*" * 5_000},
    "dots": {"type": "string", "pattern": ".*" * 20_000},
    "many states": {"type": "string", "pattern": "^(.*a.{500}b.*|.*c.{400}d.*)*$"},
    "brackets": {"type": "string", "pattern": "(" * 20_000 + "a" + ")" * 20_000},
    "long array": {"const": [[index] for index in range(8_000)]},
    "many properties": {"type": "object", "properties": {f"k{index}": {"type": "integer"} for index in range(2_000)}},
    "chain of references": {
        "$defs": {**{f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(1_000)}, "a1000": {}},
        "$ref": "#/$defs/a0",
    },
    "intersections": {"allOf": [{"type": "string", "pattern": f"^.*{index}.*$"} for index in range(30)]},
    "multiple": {"type": "integer", "multipleOf": 99_991},
    "endless": ENDLESS,
}


def attack(case: Case, grammars: Grammars, schema: dict[str, Any]) -> None:
    """Compile a grammar, and take some steps in it until it ends or fails."""
    try:
        state = case.begin(grammars, Grammar.json_schema(schema))
        for _ in range(20):
            tokens = allowed(state, case.vocab)
            if state.done or not tokens:
                return
            state.add(tokens[len(tokens) // 2])
    except UsageError:
        return


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_only_a_task_that_takes_long_gets_a_lower_priority(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[int] = []
    monkeypatch.setattr(os, "setpriority", lambda _, thread, __: lowered.append(thread))
    schema = {"type": "object", "properties": {f"k{index}": {"type": "boolean"} for index in range(200)}}
    for seconds, expected in ((60.0, 0), (0.0, 1)):
        grammars = case.grammars(long_seconds=seconds)
        state = grammars.begin(Grammar.json_schema(schema))
        while not state.ready.done():
            grammars.lower_long()
        assert len(lowered) == expected
        assert not state.compiled.worker.lowered, "what follows is quick again"
        state.add(allowed(state, case.vocab)[0])
        assert allowed(state, case.vocab)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_tokens_before_the_end_of_a_long_compilation_are_taken_in(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    grammars = case.grammars(long_seconds=0.0)
    grammars.prepare()
    with grammars._answers:  # which the compilation needs at its end
        state = grammars.begin(pattern("ab"))
        state.add(case.tokens('"')[-1])
        while not state.compiled.worker.lowered:
            grammars.lower_long()
    assert allowed(state, case.vocab) == [case.tokens("a")[-1]]


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_bounded_in_time_and_memory_and_hold_up_no_other_thread(case: Case, name: str) -> None:
    delays = []
    for _ in range(ATTEMPTS):
        grammars, ended = case.grammars(), threading.Event()
        grammars.prepare()
        memory, seconds = psutil.Process().memory_info().rss, time.process_time()
        with ThreadPoolExecutor(1) as other:
            delay = other.submit(nap, ended)
            attack(case, grammars, ATTACKS[name])
            ended.set()
        assert psutil.Process().memory_info().rss - memory < MOST_MEMORY
        assert time.process_time() - seconds < MOST_SECONDS
        delays.append(delay.result())
        if delays[-1] < MOST_DELAY:
            return
    pytest.fail(f"another thread waited {[round(each, 3) for each in delays]} s")


def test_texts_that_use_up_the_processor_time_of_their_grammar_fail(case: Case) -> None:
    grammars = case.grammars(seconds=0.0)
    state = case.begin(grammars, Grammar.json_object())
    state.add(case.tokens("{")[-1])
    state.grammars.wait([state], SECONDS)
    with pytest.raises(UsageError, match="the grammar has used up its processor time"):
        state.forbid(np.zeros(case.vocab, dtype=np.float32))


def test_equal_grammars_share_a_thread_and_others_are_refused_when_there_are_too_many(case: Case) -> None:
    grammars = case.grammars(grammars=2)
    states = [
        case.begin(grammars, pattern("a")),
        case.begin(grammars, pattern("a")),
        case.begin(grammars, pattern("b")),
    ]
    assert len(grammars) == 2
    with pytest.raises(QueueFull, match="2 different grammars are at work already"):
        grammars.begin(pattern("c"))
    states[2].close()
    assert allowed(case.begin(grammars, pattern("c")), case.vocab)
    assert len(grammars) == 2


def test_padding_and_truncation_of_the_tokenizer_change_no_grammar(case: Case) -> None:
    expected = allowed(case.begin(case.grammars(), pattern("ab")), case.vocab)
    case.tokenizer.backend.enable_padding(length=8)
    case.tokenizer.backend.enable_truncation(1)
    assert allowed(case.begin(case.grammars(), pattern("ab")), case.vocab) == expected


def test_texts_of_one_grammar_are_independent(case: Case) -> None:
    grammars = case.grammars()
    first, second = case.begin(grammars, pattern("(a|bc)")), case.begin(grammars, pattern("(a|bc)"))
    for token in case.tokens('"a'):
        first.add(token)
    for token in case.tokens('"b'):
        second.add(token)
    assert set(allowed(first, case.vocab)).isdisjoint(allowed(second, case.vocab))
    first.add(case.tokens('"')[-1])
    grammars.wait([first], SECONDS)
    assert (first.done, second.done) == (True, False)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ],
    ids=str,
)
def test_references_in_a_circle_are_refused_with_a_plain_message(case: Case, schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        case.begin(case.grammars(), Grammar.json_schema(schema))
    assert str(caught.value) == (
        "response_format: no text follows this grammar; a $ref may refer to itself, or rules may exclude each other"
    )


def test_the_texts_end_with_the_engine_and_another_can_begin(case: Case) -> None:
    grammars = case.grammars()
    state = case.begin(grammars, Grammar.json_object())
    grammars.close()
    state.add(case.tokens("{")[-1])
    with pytest.raises(UsageError, match="the engine has been closed"):
        state.forbid(np.zeros(case.vocab, dtype=np.float32))
    assert len(grammars) == 0
    assert allowed(case.begin(grammars, Grammar.json_object()), case.vocab)


def test_grammars_without_texts_are_kept_if_they_are_few(case: Case) -> None:
    grammars = case.grammars(idle=1)
    for letter in "abc":
        case.begin(grammars, pattern(letter)).close()
    assert list(grammars._compiled) == [pattern("c").source]


# ---------------------------------------------------------------------------------------------- in an engine


@pytest.fixture
def engine(llama_folder: Path) -> Iterator[Engine]:
    made = Engine(llama_folder, EngineOptions(dtype="float32", kv_cache_memory=8 << 20, max_num_seqs=8))
    yield made
    made.close()


def test_a_text_whose_grammar_fails_ends_with_an_error_and_not_with_stop(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, grammar=Grammar.json_schema(ENDLESS))
    engine.add(Request("bad", engine.encode("x"), params))
    engine.add(Request("good", engine.encode("x"), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)))
    whole = run(engine)
    assert (whole["bad"].finish_reason, whole["bad"].caused_by_request) == ("error", True)
    assert re.fullmatch("response_format: .*", str(whole["bad"].error))
    assert (whole["good"].finish_reason, len(whole["good"].tokens)) == ("length", 8)


def test_a_grammar_that_answers_late_holds_up_no_other_sequence(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    params = SamplingParams(temperature=0.0, max_tokens=40, grammar=Grammar.json_schema(schema))
    plain = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (expected,) = engine.generate(["x"], params)
    assert json.loads(expected.text)["a"] in (True, False)
    known, steps = GrammarState.known, 0
    monkeypatch.setattr(GrammarState, "known", property(lambda self: steps % 3 == 0 and known.fget(self)))  # type: ignore[attr-defined]
    monkeypatch.setattr(GrammarState, "added", property(lambda self: False, lambda self, value: None), raising=False)
    monkeypatch.setattr("minifloat.engine.sampling._GRAMMAR_SECONDS", 0.0)
    engine.add(Request("late", engine.encode("x"), params))
    engine.add(Request("plain", engine.encode("y"), plain))
    texts = {"late": "", "plain": ""}
    while "plain" in engine._sequences:
        steps += 1
        deliveries = engine.step()
        assert sum(len(each.tokens) for each in deliveries if each.request_id == "plain") == 1
        for each in deliveries:
            texts[each.request_id] += each.text
    while engine.has_work:
        steps += 1
        for each in engine.step():
            texts[each.request_id] += each.text
    assert texts["late"] == expected.text


@pytest.mark.parametrize("more", [0, 1])
def test_json_that_ends_with_the_last_token_stops_and_is_not_cut(engine: Engine, more: int) -> None:
    grammar = Grammar.json_schema({"const": True})
    (whole,) = engine.generate(["x"], SamplingParams(temperature=0.0, max_tokens=len("true") + more, grammar=grammar))
    assert (whole.text, whole.finish_reason) == ("true", "stop")
    (cut,) = engine.generate(["x"], SamplingParams(temperature=0.0, max_tokens=3, grammar=grammar))
    assert (cut.text, cut.finish_reason) == ("tru", "length")


def test_min_tokens_does_not_continue_json_that_has_ended(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=10, grammar=Grammar.json_schema({"const": True}))
    (whole,) = engine.generate(["x"], params)
    assert (whole.text, whole.finish_reason) == ("true", "stop")
