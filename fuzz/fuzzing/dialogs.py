"""Answers of models with calls and thinking, and tools: read the same in every split; a grammar is made or refused.

An input is JSON: `format`, `text`, `cuts` (places where the text is split), `tools`, `required`, `separate`, and
`prompt_end`.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from dialog_goldens import TEXTS, TOOLS, Answer, format_of, read

from fuzzing.mutation import decoded, encoded, json_mutator
from fuzzing.target import Target
from minifloat.serve.dialog.conversation import Conversation, Thinking, Tool, ToolChoice
from minifloat.serve.dialog.formats import NAMES
from minifloat.serve.dialog.grammar import call_grammar

_TOOLS = [{"name": tool.name, "parameters": dict(tool.parameters), "strict": True} for tool in TOOLS]


def _tool(value: Any) -> Tool | None:
    """Return a tool as the API takes it: the schema is any object."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"].isascii():
        return None
    parameters = value.get("parameters")
    return Tool(
        value["name"], parameters=parameters if isinstance(parameters, dict) else {}, strict=bool(value.get("strict"))
    )


def _run(data: bytes) -> None:
    value = decoded(data)
    if not isinstance(value, dict) or value.get("format") not in NAMES or not isinstance(value.get("text"), str):
        return
    form, text = format_of(value["format"]), value["text"].encode(errors="replace").decode()
    found = value.get("tools")
    tools = tuple(filter(None, map(_tool, found if isinstance(found, list) else [])))
    asked = Conversation(
        [],
        tools,
        ToolChoice("required" if value.get("required") else "auto"),
        thinking=Thinking(separate=value.get("separate") is not False),
    )
    prompt_end = value.get("prompt_end")
    prompt_end = prompt_end if isinstance(prompt_end, str) else ""
    whole = read(form, asked, [text], prompt_end)
    cuts = value.get("cuts")
    places = {place for place in cuts if isinstance(place, int)} if isinstance(cuts, list) else set()
    ordered = [0, *sorted(place for place in places if 0 < place < len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(ordered)]
    assert read(form, asked, pieces, prompt_end) == whole, "the answer depends on the split"
    _check(whole, tools)
    grammar = call_grammar(form, asked, prompt_end)
    if grammar is not None:
        grammar.check("tools")


def _check(answer: Answer, tools: tuple[Tool, ...]) -> None:
    for name, arguments, ended in answer.calls:
        assert any(tool.name == name for tool in tools), name
        assert not ended or isinstance(json.loads(arguments), dict)


def _seeds() -> dict[str, bytes]:
    return {
        name: encoded(
            {
                "format": name, "text": f"<think>Why?</think>\n\n{TEXTS[name]['two']}\n{TEXTS[name]['rich']}",
                "cuts": [3, 40, 41, 99], "tools": _TOOLS, "required": True, "separate": True, "prompt_end": "<think>",
            }
        )
        for name in NAMES
    }  # fmt: skip


_WORDS = {*NAMES, *(literal for name in NAMES for literal in format_of(name).literals()), "get_time", "write_file"}
_WORDS |= {"type", "string", "object", "array", "properties", "required", "items", "enum", "const", "anyOf", "$ref"}
_WORDS |= {
    "#/properties/city",
    "#",
    "pattern",
    "maxLength",
    "minLength",
    "additionalProperties",
    '"',
    "{",
    "}",
    "(",
    ")",
}

TARGET = Target(_run, _seeds, seconds=5, mutate=json_mutator(_WORDS))
