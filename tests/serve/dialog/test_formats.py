# ruff: noqa: RUF001, E501 - templates as they are, with DeepSeek's markers
"""Finding the format of a model from its chat template and its added tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from minifloat.errors import UsageError
from minifloat.serve.dialog.formats import FORMATS, NAMES, find_format, opens_thinking

#: Excerpts of published templates -> format.
_EXCERPTS = {
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}": "harmony",
    "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n```json\\n'}}": "deepseek-v3",
    "{{'<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments']}}": "deepseek-v3.1",
    "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"$FUNCTION_NAME\">": "deepseek-v3.2",
    "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"$TOOL_NAME\">": "deepseek-v4",
    "<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"$TOOL_NAME\">": "deepseek-v4.1",
    "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}<|tool_call_end|>": "kimi-k2",
    "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name=\"tool-name-1\">": "minimax-m2",
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>": "glm-4.7",
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>": "glm",
    "<seed:tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>": "seed-oss",
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>": "qwen3-coder",
    "{{- '<|tool_call>call:' + function['name'] + '{' -}}": "gemma4",
    "<start_function_call>call:{{ name }}{": "functiongemma",
    "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}": "mistral",
    "{{- '[TOOL_CALLS] [' }}": "mistral-list",
    "<function_calls>\n{{ call }}\n</function_calls>": "olmo3",
    "{{ '<|tool_call_start|>[' + call + ']<|tool_call_end|>' }}": "lfm2",
    "<TOOLCALL>[{{ calls }}]</TOOLCALL>": "nemotron",
    "{{ message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}": "phi4-mini",
    "<|start_of_role|>respond only with <|tool_call|> followed by a JSON list": "granite",
    "<|start_of_role|>return a json object within <tool_call></tool_call> XML tags": "granite4",
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>": "hermes",
    "{%- if tools %}<|python_start|>": "llama4",
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.': "llama3",
    "<start_of_turn>user\n```tool_code": "gemma3",
    "{% for m in messages %}{{ m.content }}{% endfor %}": "generic",
}  # fmt: skip


@pytest.mark.parametrize(("template", "name"), _EXCERPTS.items(), ids=_EXCERPTS.values())
def test_a_template_tells_the_format(template: str, name: str) -> None:
    assert find_format(template, {"<|eot|>": 7}).name == name


def test_every_format_is_told_by_a_template_and_has_what_a_grammar_needs() -> None:
    assert set(_EXCERPTS.values()) == set(NAMES)
    assert len(set(NAMES)) == len(FORMATS)
    for form in FORMATS:
        assert form.channels or form.begin
        assert form.arguments == "object" or form.channels or form.name_end
        assert (form.elements is not None) == (form.arguments == "elements")
        assert bool(form.quote) == (form.arguments == "gemma")


def test_the_template_goes_before_the_tokens_and_a_name_before_both() -> None:
    tokens = {"<|tool_call_argument_begin|>": 1, "<tool_call>": 2}
    assert find_format("", tokens).name == "kimi-k2"
    assert find_format("<tool_call>", tokens).name == "hermes"
    assert find_format("<tool_call>", tokens, "llama3").name == "llama3"
    with pytest.raises(UsageError, match=r"^--tool-format llama: expected one of harmony"):
        find_format("", {}, "llama")


def test_markers_are_the_tokens_of_the_format() -> None:
    tokens = {"<tool_call>": 5, "</tool_call>": 6, "<think>": 7, "</think>": 8, "<|im_end|>": 9, "\n": 10, "": 11}
    found = find_format("<tool_call></think>", tokens)
    assert dict(found.tokens) == {"<tool_call>": 5, "</tool_call>": 6, "<think>": 7, "</think>": 8}
    assert set(found.markers) == set(found.tokens)


@pytest.mark.parametrize(
    ("template", "tokens", "thinking"),
    [
        ("<tool_call> {% if '</think>' in content %}", {}, ("<think>", "</think>")),
        ("<tool_call>", {"</think>": 1}, ("<think>", "</think>")),
        ("[TOOL_CALLS][ARGS] [/THINK]", {"</think>": 1}, ("[THINK]", "[/THINK]")),
        ("<|tool_call> {{ '<channel|>' }}", {}, ("<|channel>thought", "<channel|>")),
        ("<tool_call>", {}, None),
    ],
)
def test_the_thinking_is_told_by_its_end(template: str, tokens: dict[str, int], thinking: object) -> None:
    assert find_format(template, tokens).thinking == thinking


def test_the_end_of_a_prompt_opens_the_thinking() -> None:
    form = find_format("<tool_call></think>", {})
    assert opens_thinking(form, "assistant\n<think>\n")
    assert not opens_thinking(form, "<think>\n\n</think>\n\n")
    assert not opens_thinking(form, "<think> so")
    assert opens_thinking(form, "<think> so", continues=True)
    assert not opens_thinking(find_format("<tool_call>", {}), "<think>")


def table() -> str:
    """Return the table of formats as the documentation has it."""
    lines = ["| name | models | a call begins with | arguments | several calls |", "|---|---|---|---|---|"]
    for form in FORMATS:
        several = "in one frame" if form.separator is not None else "no" if form.channels else "each in its own"
        begin = (
            "a list or an object"
            if form.bare
            else f"`` {(*form.begin, '<|channel|>commentary to=functions.')[0].strip()} ``"
        )
        arguments = "json" if form.channels else form.arguments
        lines.append(
            f"| `{form.name}` | {form.models} | {begin} | {arguments} | {several} |".replace("<|", "<\\|").replace(
                "|>", "\\|>"
            )
        )
    return "\n".join(lines)


def test_the_documentation_has_every_format() -> None:
    page = Path(__file__).parents[3] / "docs" / "tool-formats.md"
    assert table() in page.read_text(encoding="utf-8")
