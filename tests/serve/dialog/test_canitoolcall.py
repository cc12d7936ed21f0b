"""The fixtures of the package canitoolcall: what models of nine families write, and what it means."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from canitoolcall.fixtures import Fixture, load_fixtures
from canitoolcall.pytest_plugin import assert_conforms
from canitoolcall.results import ParsedToolCall, ParseResult
from dialog_goldens import Answer, conversation, format_of, read

from minifloat.serve.dialog.conversation import Tool

FIXTURES = load_fixtures()
#: Variant of a family, which its fixtures name by their tags or models -> format; None: not supported.
VARIANTS = {
    "qwen3-hermes": "hermes", "qwen3-xml": "qwen3-coder", "gemma4": "gemma4", "gpt-oss": "harmony",
    "x-deepseek-v3": "deepseek-v3", "x-deepseek-v31": "deepseek-v3.1", "x-deepseek-v32": "deepseek-v3.2",
    "x-deepseek-v4": "deepseek-v4", "x-deepseek-v41": "deepseek-v4.1", "x-kimi-k2": "kimi-k2", "x-kimi-k3": None,
    "x-llama-json": "llama3", "x-llama-pythonic": "llama4", "GLM-4.5": "glm", "GLM-4.7": "glm-4.7",
    "GLM-5.3": "glm-4.7", "Mistral-7B-Instruct-v0.3": "mistral-list", "mistral": "mistral",
}  # fmt: skip
THINKING = {"gemma4": ("<|channel>thought", "<channel|>"), "mistral": ("[THINK]", "[/THINK]")}
#: What differs, and why.
KNOWN = {
    "glm/glm47-missing-last-close-arg-value": "a value whose end is missing",
    "qwen3-xml/vllm-coder-missing-close-parameter": "a value whose end is missing",
    "qwen3-xml/bug-missing-close-parameter-before-function": "a value whose end is missing",
    "kimi/k2i-vllm-noise-between-markers": "text where a call must be is text, not dropped",
    "gpt-oss/llamacpp-builtin-python-recipient": "code for a tool that was not offered is text, not dropped",
    "gpt-oss/harmony-marker-in-reasoning": "the text of a special token is read as that token",
    "llama/l4-truncated-missing-close-bracket": "a whole call before one that is cut off is kept",
    "mistral/v13think-stop-at-open-marker": "half of a call is text, not dropped",
    "qwen3-xml/q38-truncated-at-tool-call-open": "half of a call is text, not dropped",
}


def format_name(fixture: Fixture) -> str | None:
    model = fixture.reference_model.partition("/")[2]
    return VARIANTS[next(name for name in (*fixture.tags, model, fixture.family) if name in VARIANTS)]


def answers(fixture: Fixture, name: str) -> tuple[Answer, Answer]:
    """Return what is read of the whole text, and of one character after another."""
    functions = [tool["function"] for tool in fixture.tools]
    tools = tuple(Tool(each["name"], parameters=each.get("parameters") or {}) for each in functions)
    form = format_of(name, THINKING.get(name, ("<think>", "</think>")))
    if "Magistral-Small-2506" in fixture.reference_model or name in ("llama3", "llama4"):
        form = replace(form, thinking=("<think>", "</think>") if name == "mistral" else None)
    prompt_end = fixture.generation_prompt
    if prompt_end is None:
        assert fixture.source is not None
        models = json.loads((fixture.source.parent / "family.json").read_text())["reference_models"]
        model = next(each for each in models if each["repo"] == fixture.reference_model)
        prompt_end = model.get("default_generation_prompt", "")
    asked = conversation(tools=tools)
    whole, pieces = [fixture.raw_output], list(fixture.raw_output)
    return read(form, asked, whole, prompt_end), read(form, asked, pieces, prompt_end)


def result(answer: Answer) -> ParseResult:
    """Return an answer in the package's form; a call that was cut off is none there."""
    calls = tuple(ParsedToolCall(name, arguments) for name, arguments, ended in answer.calls if ended)
    return ParseResult(answer.text or None, answer.thinking or None, calls)


@pytest.mark.parametrize("family", sorted({fixture.family for fixture in FIXTURES}))
def test_fixtures_are_read_as_expected(family: str) -> None:
    failed, count = {}, 0
    for fixture in FIXTURES:
        if fixture.family != family or (name := format_name(fixture)) is None:
            continue
        whole, pieces = answers(fixture, name)
        assert pieces == whole, fixture.id
        count += 1
        try:
            assert_conforms(fixture, result(whole), soft=True)
        except AssertionError as error:
            failed[fixture.id] = str(error)
    assert count >= 25
    unknown = [message for id, message in failed.items() if id not in KNOWN]
    assert unknown == []
    assert {id for id in KNOWN if id.partition("/")[0] == family} == failed.keys()
