"""Special tokens that are part of the text, and thinking: stop strings leave it alone, and a budget ends it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minifloat.engine import Engine, EngineOptions, Grammar, SamplingParams, Thinking
from minifloat.engine.text import TextStream, ThinkingText
from minifloat.errors import UsageError
from minifloat.model.runtime.tokenizer import load_tokenizer

STORIES = Path(__file__).parents[2] / "examples" / "storybook-4m"
PROMPTS = ["Once upon a time", "The dog", "Tom saw a big red ball. He", "One day, a bird", "A"]
LENGTH = 40
PAIR = ("<think>", ("</think>",))


def engine_of(**options: Any) -> Engine:
    return Engine(STORIES, EngineOptions(dtype="float32", **{"max_model_len": 256} | options))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of()


def params(engine: Engine, budget: int | None, **fields: Any) -> SamplingParams:
    closing = engine.encode("</think>") if budget is not None else ()
    thinking = Thinking(*PAIR, begun=True, budget=budget, closing=closing)
    return SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, thinking=thinking, **fields)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["", " \n<think>", "<think>"]),
    st.sampled_from(["", "a<", "a</thin b", "<think>"]),
    st.sampled_from(["</think>", "[call]", ""]),
    st.sampled_from(["", " answer </think> x"]),
    st.lists(st.integers(0, 40), max_size=8),
)
def test_the_thinking_is_found_however_the_text_is_cut(
    begin: str, thought: str, close: str, answer: str, cuts: list[int]
) -> None:
    whole = begin + thought + close + (answer if close else "")
    machine = ThinkingText(Thinking("<think>", ("</think>", "[call]"), begun=not begin))
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    parts = [machine.add(whole[low:high]) for low, high in itertools.pairwise(places)]
    parts.append(machine.rest())
    assert "".join(part[0] for part in parts) == begin + thought + close
    assert "".join(part[1] for part in parts) == (answer if close else "")
    assert machine.over == bool(close)


@pytest.mark.parametrize("text", ["Hello <think> x </think>", "<thin", "  ", "<thinking>"])
def test_a_text_that_begins_otherwise_does_not_think(text: str) -> None:
    machine = ThinkingText(Thinking(*PAIR))
    parts = [*map(machine.add, text), machine.rest()]
    assert "".join(part[1] for part in parts) == text
    assert not machine.begun


def test_only_special_tokens_that_are_visible_are_part_of_the_text(llama_folder: Path) -> None:
    tokenizer = load_tokenizer(llama_folder)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokens = [
        *tokenizer("a ä").input_ids,
        bos,
        *tokenizer(" b").input_ids,
        eos,
        eos,
        *tokenizer("ä").input_ids[:-1],
        eos,
    ]
    for visible, text in (((), "a ä bÃ"), ((eos,), "a ä b</s></s>�</s>"), ((bos, eos), "a ä<s> b</s></s>�</s>")):
        stream = TextStream(tokenizer, (), visible=frozenset(visible))
        found = "".join(stream.add(token)[0] for token in tokens) + stream.finish()[0]
        assert found == text.replace("Ã", "�")


def test_a_budget_ends_the_thinking_and_nothing_else_changes(engine: Engine) -> None:
    closing = engine.encode("</think>")
    for free, prompt in zip(engine.generate(PROMPTS, params(engine, None)), PROMPTS, strict=True):
        for budget in (0, 1, 7):
            (text,) = engine.generate([prompt], params(engine, budget))
            assert text.tokens[:budget] == free.tokens[:budget]
            assert text.tokens[budget : budget + len(closing)] == closing
            plain = SamplingParams(temperature=0.0, max_tokens=LENGTH - budget - len(closing), ignore_eos=True)
            (rest,) = engine.generate([(*engine.encode(prompt), *text.tokens[: budget + len(closing)])], plain)
            assert text.tokens[budget + len(closing) :] == rest.tokens
            assert text.usage.thinking_tokens == budget + len(closing)
        assert free.usage.thinking_tokens == LENGTH, "it never closes by itself"


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        {"max_model_len": 80, "kv_cache_memory": 600_000},
        {"speculate": "prompt"},
        {"speculate": "self"},
    ],
    ids=["in pieces", "preempted", "prompt", "self"],
)
def test_budgets_hold_in_batches_with_drafts_and_after_preemptions(engine: Engine, options: dict[str, Any]) -> None:
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    budgets = [index * 2 % 23 for index in range(len(prompts) - 1)] + [None]
    asked = [params(engine, budget, seed=index) for index, budget in enumerate(budgets)]
    alone = [engine.generate([prompt], one)[0].tokens for prompt, one in zip(prompts, asked, strict=True)]
    other = engine_of(**options)
    assert [text.tokens for text in other.generate(prompts, asked)] == alone
    assert bool(other._scheduler.preemptions) == ("kv_cache_memory" in options)
    if other.speculator is not None:
        other.generate([PROMPTS[0]], params(other, LENGTH - 1))
        assert other.speculator.stats.drafts, "of a thinking that goes on"


def test_thinking_that_the_model_opens_itself_is_counted_from_there(engine: Engine) -> None:
    closing = engine.encode("</think>")
    grammar = Grammar.json_schema({"const": "<think>and on and on and on"})
    opened = Thinking('"<think>', ('"', "</think>"), budget=2, closing=closing)
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, grammar=grammar, thinking=opened)
    (text,) = engine.generate(["A"], sampling)
    before = next(
        n for n in range(30) if "".join(map(str, [engine.tokenizer.decode(text.tokens[:n])])).count("<think>")
    )
    assert text.tokens[before + 2 : before + 2 + len(closing)] == closing
    unopened = Thinking("<other>", ("</think>",), budget=2, closing=closing)
    (text,) = engine.generate(["A"], SamplingParams(temperature=0.0, max_tokens=30, thinking=unopened))
    assert closing[0] not in text.tokens
    assert text.usage.thinking_tokens == 0


def test_stop_strings_end_the_answer_and_not_the_thinking(engine: Engine) -> None:
    (free,) = engine.generate(["Once upon a time"], params(engine, 12))
    thought, answer = free.text.split("</think>")
    stop = " the" if " the" in thought else thought[2:4]
    assert stop in thought
    after = answer[5:8]
    assert after not in answer[:5]
    (text,) = engine.generate(["Once upon a time"], params(engine, 12, stop=(stop, after)))
    assert text.text.startswith(f"{thought}</think>")
    assert text.finish_reason == "stop"
    assert text.stop_reason in (stop, after)


def test_thinking_that_cannot_be_closed_is_refused(engine: Engine) -> None:
    for fields in ({"budget": 3}, {"budget": -1, "closing": (1,)}, {"close": ()}, {"open": ""}):
        with pytest.raises(UsageError, match="thinking: expected"):
            Thinking(**{"open": "a", "close": ("b",)} | fields)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="thinking: expected token ids"):
        engine.check((1,), SamplingParams(thinking=Thinking(*PAIR, budget=1, closing=(10**6,))))
    with pytest.raises(UsageError, match="visible: expected token ids"):
        engine.check((1,), SamplingParams(visible=frozenset({-1})))
