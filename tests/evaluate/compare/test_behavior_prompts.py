"""Prompts of `compare --behavior`: what a line may say, what is sent, and how answers are marked."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from minifloat.errors import DataError, UsageError
from minifloat.evaluate.compare import behavior_prompts
from minifloat.evaluate.compare.behavior_prompts import BUILT_IN, Prompts
from minifloat.evaluate.compare.options import CompareOptions
from minifloat.evaluate.compare.run import read_prompts
from minifloat.serve.api.chat import ChatCompletionRequest

USER = [{"role": "user", "content": "1 + 2?"}]
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "number"}}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": NUMBERS, "required": ["a", "b"]}},
}
NOTE = {"type": "function", "function": {"name": "note", "strict": True}}
TOOLS = {"messages": USER, "tools": [ADD, NOTE]}
AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def formatted(schema: Any = AGE, **fields: Any) -> dict[str, Any]:
    return {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}} | fields


def written(folder: Path, *lines: Any) -> str:
    path = folder / "agent.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def read(folder: Path, *lines: Any) -> Prompts:
    return Prompts.read(written(folder, *lines), 64)


def answer(content: str | None = None, *calls: tuple[str, Any], **choice: Any) -> dict[str, Any]:
    functions = [
        {"name": name, "arguments": value if isinstance(value, str) else json.dumps(value)} for name, value in calls
    ]
    message = {"content": content, "tool_calls": [{"id": "x", "function": function} for function in functions]}
    return {"choices": [{"message": message, "finish_reason": "stop"} | choice]}


def test_the_prompts_that_come_with_minifloat_are_40_of_every_kind() -> None:
    prompts = Prompts.read(BUILT_IN, 512)
    names = [prompt.name for prompt in prompts.prompts]
    kinds = [
        "schema"
        if prompt.schema
        else "none"
        if not prompt.expected
        else "several"
        if len(prompt.expected) > 1
        else "one"
        for prompt in prompts.prompts
    ]
    assert (len(names), len(set(names))) == (40, 40)
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"one": 27, "several": 2, "none": 3, "schema": 8}
    assert sum("tool" in {message["role"] for message in body["messages"]} for body in prompts.bodies) >= 5
    for body in prompts.bodies:
        assert not body.keys() & {"name", "expected", "response_format"}
        assert ChatCompletionRequest.model_validate({**body, "model": "m"}).temperature == 0


def test_the_example_of_the_documents_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "compare.md").read_text(encoding="utf-8")
    first, second = read(tmp_path, page.partition("```json\n")[2].partition("```")[0]).prompts
    assert first.expected == (("get_weather", '{"city": "Oslo"}'),)
    assert second.marked(answer('{"age": 34}')).is_good


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON.*one object per line"),
        ("[1]", "JSON object"),
        (TOOLS | {"tool_choice": "required"}, "unknown field 'tool_choice'; a prompt has .*messages"),
        ({"tools": [ADD]}, "the field 'messages' is missing"),
        ({"messages": [], "tools": [ADD]}, "messages: .*at least 1 item"),
        ({"messages": USER}, "tools, response_format: a prompt has one of them"),
        (formatted(tools=[ADD]), "tools, response_format: a prompt has one of them"),
        (TOOLS | {"tools": [{"type": "function", "function": {"name": "a b"}}]}, r"tools\[0\]\.function\.name"),
        (TOOLS | {"tools": [ADD, ADD]}, "tools: two of them have the same name"),
        (TOOLS | {"temperature": "hot"}, "temperature: "),
        (TOOLS | {"messages": [{"role": "system", "content": "x"}]}, "messages: there is none of the role user"),
        (TOOLS | {"expected": [{"name": "sub"}]}, "expected: 'sub' is none of the tools add, note"),
        (
            TOOLS | {"expected": [{"name": "add", "arguments": {"a": "1", "b": 2}}]},
            "do not follow the schema of the tool",
        ),
        (TOOLS | {"expected": [{"name": "add", "value": 1}]}, r"expected\[0\]\.value"),
        (formatted(expected=[]), "expected: it is for prompts with tools"),
        (formatted({"type": "text"}), "response_format: no valid JSON schema"),
        (formatted({"pattern": "("}), "response_format: no valid JSON schema"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number_and_the_cure(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"agent\.jsonl, line 3: .*{message}"):
        read(tmp_path, TOOLS, "", line)


@pytest.mark.parametrize(
    ("bound", "value", "message"),
    [
        ("MAX_BYTES", 100, "more than 0 MiB; split the file"),
        ("MAX_PROMPTS", 1, "2 prompts; at most 1 are read: split the file"),
        ("MAX_LINE_BYTES", 200, "line 1: it has [0-9]+ bytes; at most 200 are read: shorten"),
    ],
)
def test_a_large_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int, message: str
) -> None:
    monkeypatch.setattr(behavior_prompts, bound, value)
    with pytest.raises(DataError, match=message):
        read(tmp_path, TOOLS, TOOLS)


@pytest.mark.parametrize(
    ("lines", "message"), [([], "no prompts; write one JSON object per line"), (None, "no such file")]
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, lines: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Prompts.read(str(tmp_path) if lines is None else written(tmp_path), 64)


ONE = [{"name": "add", "arguments": {"a": 1, "b": 2}}]


@pytest.mark.parametrize(
    ("expected", "calls", "marks"),
    [
        (ONE, [("add", {"b": 2.0, "a": 1})], (True, True, True)),
        (ONE, [("add", {"a": 1, "b": 3})], (True, True, False)),
        (ONE, [("add", {"a": True, "b": 2})], (False, True, False)),
        (ONE, [("add", '{"a": 1, "b"')], (False, True, False)),
        (ONE, [("add", '{"a": 1, "b": NaN}')], (False, True, False)),
        (ONE, [("add", "[" * 100_000)], (False, True, False)),
        (ONE, [("note", {})], (True, False, False)),
        (ONE, [("sub", {})], (False, False, False)),
        (ONE, [("add", {"a": 1, "b": 2}), ("note", {})], (True, False, False)),
        (ONE, [], (False, False, False)),
        ([{"name": "add"}], [("add", {"a": 5, "b": 5})], (True, True, None)),
        ([*ONE, {"name": "note"}], [("note", {"x": 1}), ("add", {"a": 1, "b": 2})], (True, True, None)),
        ([], [], (None, True, None)),
        ([], [("note", {})], (None, False, None)),
        (None, [("note", {})], (True, None, None)),
        (None, [], (False, None, None)),
    ],
)
def test_calls_are_marked_by_their_schemas_and_by_what_is_expected(
    tmp_path: Path, expected: Any, calls: Any, marks: tuple[bool | None, ...]
) -> None:
    (prompt,) = read(tmp_path, TOOLS if expected is None else TOOLS | {"expected": expected}).prompts
    names = ("valid calls", "right functions", "right arguments")
    assert prompt.marked(answer("Well.", *calls)).marks == {
        name: mark for name, mark in zip(names, marks, strict=True) if mark is not None
    }


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"age": 3}', True),
        (' {"age": 3.0}\n', True),
        ('```json\n{"age": 3}\n```', True),
        ('```\n{"age": 3}```', True),
        ('Here it is: {"age": 3}', False),
        ('{"age": "3"}', False),
        ('{"age": NaN}', False),
        ("3", False),
        ('{"age": 1e999}', False),
        ('{"age": 3, "x": ' + "[" * 80 + "]" * 80 + "}", False),
        ("", False),
    ],
)
def test_an_answer_in_json_is_marked_by_its_schema(tmp_path: Path, text: str, valid: bool) -> None:
    (prompt,) = read(tmp_path, formatted()).prompts
    assert prompt.marked(answer(text)).marks == {"valid JSON": valid}


def test_what_a_server_says_beside_the_answer_is_read(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, TOOLS).prompts
    body = answer("Hm.", ("note", {"z": 1, "a": "é"}), finish_reason="length")
    found = prompt.marked(body)
    assert (found.thinking_tokens, found.prompt_tokens, found.cut_off) == (None, None, True)
    assert found.calls == (("note", '{"a": "\\u00e9", "z": 1}'),)
    assert found.said == 'Hm.\nnote({"z": 1, "a": "\\u00e9"})'
    body["usage"] = {"prompt_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 5}}
    assert (prompt.marked(body).thinking_tokens, prompt.marked(body).prompt_tokens) == (5, 9)
    assert len(prompt.marked(answer("x" * 10_000)).said) < 2100


@pytest.mark.parametrize("body", [None, [], {}, {"choices": []}, {"choices": [{"message": {"tool_calls": [{}]}}]}])
def test_an_answer_that_is_none_names_the_prompt(tmp_path: Path, body: Any) -> None:
    (prompt,) = read(tmp_path, TOOLS | {"name": "sum"}).prompts
    with pytest.raises(DataError, match="sum: the answer is none of /v1/chat/completions"):
        prompt.marked(body)


def test_the_question_says_the_schema_and_no_grammar_is_asked_for(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "How old?"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "He is"}]
    first, second, tools = read(tmp_path, formatted(), formatted(messages=messages), TOOLS | {"seed": 1}).bodies
    assert first["messages"][0]["content"].startswith("1 + 2?\n\nAnswer with JSON that follows this schema")
    assert json.loads(first["messages"][0]["content"].splitlines()[-1]) == AGE
    assert second["messages"][0]["content"][0] == parts[0]
    assert second["messages"][0]["content"][1]["text"].endswith(json.dumps(AGE))
    assert second["messages"][1] == messages[1]
    assert tools == TOOLS | {
        "seed": 1,
        "temperature": 0.0,
        "max_tokens": 64,
        "tools": [ADD, {**NOTE, "function": {"name": "note"}}],
    }


@pytest.mark.parametrize("reference", ["http://127.0.0.1:9/x.json", "#/$defs/x", "#"])
def test_a_reference_that_leads_nowhere_is_refused_and_nothing_is_fetched(tmp_path: Path, reference: str) -> None:
    with pytest.raises(DataError, match=f"line 1: response_format: '{re.escape(reference)}' leads nowhere"):
        read(tmp_path, formatted({"$ref": reference}))


def test_a_schema_that_goes_in_a_circle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: response_format: the schema goes in a circle"):
        read(tmp_path, formatted({"anyOf": [{"$ref": "#"}]}))


def test_prompts_need_packages_of_the_extra_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "minifloat.evaluate.compare.behavior_prompts")
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(UsageError, match=r"--behavior needs pip install 'minifloat\[serve\]'"):
        read_prompts(CompareOptions(behavior=BUILT_IN))


def test_references_within_a_schema_are_followed(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, formatted({"$ref": "#/$defs/age", "$defs": {"age": AGE}})).prompts
    assert prompt.marked(answer('{"age": 3}')).is_good
    assert not prompt.marked(answer('{"age": ""}')).is_good
