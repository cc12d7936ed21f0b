# ruff: noqa: RUF001 - DeepSeek's markers have such characters
"""Calls as the families write them, by hand after their published chat templates.

Every family writes the same calls: `ONE`, `EMPTY`, `RICH` and `TWO`, which is `ONE` and then `EMPTY`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from minifloat.serve.dialog.conversation import Conversation, Tool
from minifloat.serve.dialog.events import AnswerText, CallArguments, CallBegins, CallEnds, Event, ThinkingText
from minifloat.serve.dialog.formats import DialogFormat, find_format
from minifloat.serve.dialog.parser import AnswerParser

TOOLS = (
    Tool(
        "get_weather",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    ),
    Tool("get_time", parameters={"type": "object", "properties": {}, "additionalProperties": False}),
    Tool(
        "write_file",
        parameters={
            "type": "object",
            "properties": {
                "content": {"type": "string"},
                "options": {
                    "type": "object",
                    "properties": {"tags": {"type": "array", "items": {"type": "string"}}, "deep": {}},
                },
            },
            "required": ["content", "options"],
            "additionalProperties": False,
        },
    ),
)

CONTENT = "print(\"hé 🌸\")\n\tif x: 'a' <b> \\ {}[]</b>"
OPTIONS = {"tags": ["a", "b c"], "deep": {"x": None, "y": [1.5, -2, True, {}]}}
CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one": [("get_weather", {"city": "São Paulo", "days": 3})],
    "empty": [("get_time", {})],
    "rich": [("write_file", {"content": CONTENT, "options": OPTIONS})],
    "two": [("get_weather", {"city": "São Paulo", "days": 3}), ("get_time", {})],
}

_ONE = '{"city": "São Paulo", "days": 3}'
_OPTIONS = '{"tags": ["a", "b c"], "deep": {"x": null, "y": [1.5, -2, true, {}]}}'
_RICH = '{"content": "print(\\"hé 🌸\\")\\n\\tif x: \'a\' <b> \\\\ {}[]</b>", "options": ' + _OPTIONS + "}"
_PYTHON_ONE = "get_weather(city='São Paulo', days=3)"
_PYTHON_RICH = (
    "write_file(content='print(\"hé 🌸\")\\n\\tif x: \\'a\\' <b> \\\\ {}[]</b>', "
    "options={'tags': ['a', 'b c'], 'deep': {'x': None, 'y': [1.5, -2, True, {}]}})"
)


def _objects(key: str = "arguments") -> tuple[str, str, str]:
    """Return the three calls as JSON objects with their names."""
    named = (("get_weather", _ONE), ("get_time", "{}"), ("write_file", _RICH))
    one, empty, rich = (f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in named)
    return one, empty, rich


def _dsml(space: str, calls: str) -> dict[str, str]:
    def call(name: str, *parameters: tuple[str, str, str]) -> str:
        lines = (
            f'<｜DSML｜{space}parameter name="{key}" string="{text}">{value}</｜DSML｜{space}parameter>\n'
            for key, text, value in parameters
        )
        return f'<｜DSML｜{space}invoke name="{name}">\n{"".join(lines)}</｜DSML｜{space}invoke>\n'

    one = call("get_weather", ("city", "true", "São Paulo"), ("days", "false", "3"))
    empty = call("get_time")
    rich = call("write_file", ("content", "true", CONTENT), ("options", "false", _OPTIONS))
    begin, end = f"<｜DSML｜{space}{calls}>\n", f"</｜DSML｜{space}{calls}>"
    texts = {"one": one, "empty": empty, "rich": rich, "two": one + empty}
    return {name: begin + text + end for name, text in texts.items()}


def _framed(begin: str, calls: tuple[str, str, str], end: str, separator: str | None = None) -> dict[str, str]:
    """Return calls in a frame; with a separator, one frame holds both."""
    one, empty, rich = calls
    two = f"{begin}{one}{end}\n{begin}{empty}{end}" if separator is None else begin + one + separator + empty + end
    return {"one": begin + one + end, "empty": begin + empty + end, "rich": begin + rich + end, "two": two}


_DEEPSEEK = ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
_KIMI = ("<|tool_calls_section_begin|><|tool_call_begin|>functions.", "<|tool_call_end|><|tool_calls_section_end|>")
_HARMONY = "<|channel|>commentary to=functions."
_JSON_CALLS = (("get_weather", _ONE), ("get_time", "{}"), ("write_file", _RICH))


def _named(between: str) -> tuple[str, str, str]:
    one, empty, rich = (f"{name}{between}{arguments}" for name, arguments in _JSON_CALLS)
    return one, empty, rich


def _gemma(quote: str) -> tuple[str, str, str]:
    q = quote
    return (
        f"call:get_weather{{city:{q}São Paulo{q},days:3}}",
        "call:get_time{}",
        f"call:write_file{{content:{q}{CONTENT}{q},"
        f"options:{{deep:{{x:null,y:[1.5,-2,true,{{}}]}},tags:[{q}a{q},{q}b c{q}]}}}}",
    )


TEXTS: dict[str, dict[str, str]] = {
    "harmony": {
        **{
            kind: f"{_HARMONY}{name} <|constrain|>json<|message|>{arguments}<|call|>"
            for kind, (name, arguments) in zip(("one", "empty", "rich"), _JSON_CALLS, strict=True)
        },
        "two": f"{_HARMONY}get_weather <|constrain|>json<|message|>{_ONE}<|call|>"
        f"<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{{}}<|call|>",
    },
    "deepseek-v3": _framed(
        _DEEPSEEK[0] + "function<｜tool▁sep｜>",
        _named("\n```json\n"),
        "\n```" + _DEEPSEEK[1],
        "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    ),
    "deepseek-v3.1": _framed(
        _DEEPSEEK[0], _named("<｜tool▁sep｜>"), _DEEPSEEK[1], "<｜tool▁call▁end｜><｜tool▁call▁begin｜>"
    ),
    "deepseek-v3.2": _dsml("", "function_calls"),
    "deepseek-v4": _dsml("", "tool_calls"),
    "deepseek-v4.1": _dsml(" ", "calls"),
    "kimi-k2": _framed(
        _KIMI[0],
        _named(":0<|tool_call_argument_begin|>"),
        _KIMI[1],
        "<|tool_call_end|><|tool_call_begin|>functions.",
    ),
    "minimax-m2": _framed(
        "<minimax:tool_call>\n",
        (
            '<invoke name="get_weather">\n<parameter name="city">São Paulo</parameter>\n'
            '<parameter name="days">3</parameter>\n</invoke>\n',
            '<invoke name="get_time">\n</invoke>\n',
            f'<invoke name="write_file">\n<parameter name="content">{CONTENT}</parameter>\n'
            f'<parameter name="options">{_OPTIONS}</parameter>\n</invoke>\n',
        ),
        "</minimax:tool_call>",
        "",
    ),
    "glm": _framed(
        "<tool_call>",
        (
            "get_weather\n<arg_key>city</arg_key>\n<arg_value>São Paulo</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n",
            "get_time\n",
            f"write_file\n<arg_key>content</arg_key>\n<arg_value>{CONTENT}</arg_value>\n"
            f"<arg_key>options</arg_key>\n<arg_value>{_OPTIONS}</arg_value>\n",
        ),
        "</tool_call>",
    ),
    "qwen3-coder": _framed(
        "<tool_call>\n",
        (
            "<function=get_weather>\n<parameter=city>\nSão Paulo\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n",
            "<function=get_time>\n</function>\n",
            f"<function=write_file>\n<parameter=content>\n{CONTENT}\n</parameter>\n"
            f"<parameter=options>\n{_OPTIONS}\n</parameter>\n</function>\n",
        ),
        "</tool_call>",
    ),
    "glm-4.7": _framed(
        "<tool_call>",
        (
            "get_weather<arg_key>city</arg_key><arg_value>São Paulo</arg_value>"
            "<arg_key>days</arg_key><arg_value>3</arg_value>",
            "get_time",
            f"write_file<arg_key>content</arg_key><arg_value>{CONTENT}</arg_value>"
            f"<arg_key>options</arg_key><arg_value>{_OPTIONS}</arg_value>",
        ),
        "</tool_call>",
    ),
    "seed-oss": _framed(
        "<seed:tool_call>\n",
        (
            "<function=get_weather>\n<parameter=city>São Paulo</parameter>\n<parameter=days>3</parameter>\n"
            "</function>\n",
            "<function=get_time>\n</function>\n",
            f"<function=write_file>\n<parameter=content>{CONTENT}</parameter>\n"
            f"<parameter=options>{_OPTIONS}</parameter>\n</function>\n",
        ),
        "</seed:tool_call>",
    ),
    "lfm2": _framed("<|tool_call_start|>[", (_PYTHON_ONE, "get_time()", _PYTHON_RICH), "]<|tool_call_end|>", ", "),
    "nemotron": _framed("<TOOLCALL>[", _objects(), "]</TOOLCALL>", ", "),
    "gemma4": _framed("<|tool_call>", _gemma('<|"|>'), "<tool_call|>"),
    "functiongemma": _framed("<start_function_call>", _gemma("<escape>"), "<end_function_call>"),
    "mistral": _framed("[TOOL_CALLS]", _named("[ARGS]"), ""),
    "mistral-list": _framed("[TOOL_CALLS] [", _objects(), "]", ", "),
    "olmo3": _framed("<function_calls>\n", (_PYTHON_ONE, "get_time()", _PYTHON_RICH), "\n</function_calls>", "\n"),
    "phi4-mini": _framed("<|tool_call|>[", _objects(), "]<|/tool_call|>", ", "),
    "granite": _framed("<|tool_call|>[", _objects(), "]", ", "),
    "granite4": _framed("<tool_call>\n", _objects(), "\n</tool_call>"),
    "hermes": _framed("<tool_call>\n", _objects(), "\n</tool_call>"),
    "llama4": _framed("[", (_PYTHON_ONE, "get_time()", _PYTHON_RICH), "]", ", "),
    "llama3": _framed("", _objects("parameters"), "", "; "),
    "gemma3": _framed("```tool_code\n[", (_PYTHON_ONE, "get_time()", _PYTHON_RICH), "]\n```", ", "),
    "generic": _framed("<tool_call>\n", _objects(), "\n</tool_call>"),
}

#: Markers of thinking that a format is tested with; harmony has its own.
THINKING = ("<think>", "</think>")


def conversation(tools: tuple[Tool, ...] = TOOLS, **fields: Any) -> Conversation:
    return Conversation([{"role": "user", "content": "?"}], tools=tools, **fields)


def format_of(name: str, thinking: tuple[str, str] | None = THINKING) -> DialogFormat:
    found = find_format("", {}, name)
    return found if found.channels else replace(found, thinking=thinking)


@dataclass
class Answer:
    """The events of an answer, joined.

    Attributes:
        text: Of the answer.
        thinking: Of the model.
        calls: Name, arguments as written, and whether the call ended.
    """

    text: str = ""
    thinking: str = ""
    calls: tuple[tuple[str, str, bool], ...] = ()

    @property
    def decoded(self) -> list[tuple[str, dict[str, Any]]]:
        return [(name, json.loads(arguments)) for name, arguments, _ in self.calls]


def joined(events: list[Event]) -> Answer:
    """Return the answer of events, which are checked to come in order."""
    text, thinking, calls = "", "", list[list[Any]]()
    for event in events:
        match event:
            case AnswerText(piece):
                text += piece
            case ThinkingText(piece):
                thinking += piece
            case CallBegins(index, _, name):
                assert index == len(calls)
                calls.append([name, "", False])
            case CallArguments(index, piece):
                assert index == len(calls) - 1
                assert not calls[index][2]
                calls[index][1] += piece
            case CallEnds(index):
                assert index == len(calls) - 1
                calls[index][2] = True
    return Answer(text, thinking, tuple((name, arguments, ended) for name, arguments, ended in calls))


def read(form: DialogFormat, asked: Conversation, pieces: list[str], prompt_end: str = "") -> Answer:
    parser = AnswerParser(form, asked, prompt_end)
    events = [event for piece in pieces for event in parser.add(piece)]
    return joined(events + parser.finish())
