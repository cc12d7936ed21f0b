"""Chat templates: the text of transformers, bounded, and errors that say what a template does wrong."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minifloat.errors import ChatTemplateError
from minifloat.model.runtime.templates import apply_chat_template, chat_prompt, constants, names
from minifloat.model.runtime.tokenizer import load_tokenizer


def render(template: str) -> str:
    tokenizer: Any = SimpleNamespace(chat_template=template, special_tokens_map={"eos_token": "</s>"})
    return apply_chat_template(tokenizer, [{"role": "user", "content": "hello"}], max_characters=1000)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'x' * 1001 }}", "writes more than 1000 characters"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}", "more than 1000 char"),
        ("{% if %}", "refuses the messages: Expected an expression"),
        ("{{ raise_exception('only \ud800 users') }}", "refuses the messages: only \\? users"),
        ("{{ raise_exception('x' * 10 ** 6) }}", "refuses the messages: x{500}$"),
        ("{{ '\ud800' }}", "half of a surrogate pair"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_what_a_template_does_wrong_is_said(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(template)
    assert render("{{ messages[0].content }}{{ eos_token }}") == "hello</s>"


def test_the_text_is_that_of_transformers(llama_folder: Path) -> None:
    tokenizer = load_tokenizer(llama_folder)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ m.thinking }}{{ m.name is defined }}{% endfor %}"
        "{{ tools is none }}{{ add_generation_prompt }}{{ level }}{{ 'a b' | wordwrap(1) }}{{ messages | pprint }}"
    )
    chats = [
        [{"role": "user", "content": "é\U0001f600", "name": None}],
        [{"role": "assistant", "content": "x", "reasoning": "because", "tool_calls": [{"a": 1.5, "b": [True]}]}],
    ]
    for chat in chats:
        expected = tokenizer.apply_chat_template(chat, tokenize=False, level=3)
        assert apply_chat_template(tokenizer, chat, level=3) == expected


#: Small forms of published templates, with what each does to tools, calls and results.
TEMPLATES = {
    "qwen3": (
        "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}</tools><|im_end|>\n{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}"
        "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>"
        "{{ m.reasoning_content.strip() }}</think>{% endif %}{{ m.content }}{% for call in m.tool_calls %}"
        '\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
        "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n"
        "{% endif %}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}"
        "{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools is not none %}"
        "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}{% for m in messages %}"
        "{% if 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}"
        '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>'
        "{% elif m.role == 'tool' %}ipython: {{ m.content | tojson }}{% else %}{{ m.role }}: "
        "{{ m.content | trim }}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if tools is not none and loop.index == 1 %}"
        "[AVAILABLE_TOOLS] [{% for tool in tools %}{% for key, val in tool.function.items() if key != 'return' %}"
        "{{ key }}: {{ val | tojson }}{% endfor %}{% endfor %}][/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}"
        "[/INST]{% elif m.tool_calls is defined %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
        '{{ call.function | tojson }}, "id": "{{ call.id }}"{% endfor %}]{{ eos_token }}{% elif m.role == "tool" %}'
        "[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "documents": (
        "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}\n{% endfor %}{% for m in messages %}"
        "{{ m.role }}> {{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments | tojson(ensure_ascii=True) }}"
        "{% endfor %}\n{% endfor %}{{ tools | tojson(ensure_ascii=True) if tools }}{{ '> ' if add_generation_prompt }}"
    ),
    "gpt-oss": (
        "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>{% if tools %}"
        "<|start|>developer<|message|>{% for t in tools %}type {{ t.function.name }} = (_: "
        "{{ t.function.parameters.properties | dictsort | tojson }}){% endfor %}<|end|>{% endif %}"
        "{% for m in messages %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}"
        "<|end|>{% endif %}{% for c in m.tool_calls %}<|start|>assistant to=functions.{{ c.function.name }}"
        "<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}<|start|>{{ m.role }}<|message|>"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Of a city, "now" \u2013 </s>',
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["K\u00f6ln", "<s>"]}}},
    },
}
CALL = {
    "id": "abc",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "K\u00f6ln </s>", "n": 2}},
}
DIALOG: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. <s>"},
    {"role": "user", "content": "How is it in K\u00f6ln? </s>"},
    {"role": "assistant", "content": "", "reasoning_content": "Ask </s> first.", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain </s>", "tool_call_id": "abc", "name": "weather"},
    {"role": "assistant", "content": "  It rains "},
]
OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": False, "reasoning_effort": "low"},
    {"continue_final_message": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["asked", "thinking off", "continued"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_calls_and_documents_are_rendered_as_transformers_does(
    name: str, options: dict[str, Any], llama_folder: Path
) -> None:
    tokenizer = load_tokenizer(llama_folder)
    tokenizer.chat_template = TEMPLATES[name]
    options = options | {"tools": [WEATHER, WEATHER], "documents": [{"title": "One <s>", "text": "x"}]}
    text = tokenizer.apply_chat_template(DIALOG, tokenize=False, **options)
    assert apply_chat_template(tokenizer, DIALOG, **options) == text
    if name != "documents":  # transformers lets control tokens through where a template escapes all but ASCII
        tokens = tokenizer.apply_chat_template(DIALOG, return_dict=False, sanitize_control_tokens=True, **options)
        assert chat_prompt(tokenizer, DIALOG, **options).tokens == tokens


@pytest.mark.parametrize("name", TEMPLATES)
def test_control_tokens_in_tools_calls_and_documents_are_text(name: str, llama_folder: Path) -> None:
    tokenizer = load_tokenizer(llama_folder)
    options: dict[str, Any] = {"chat_template": TEMPLATES[name], "continue_final_message": True}
    tool = copy.deepcopy(WEATHER)
    tool["function"]["parameters"]["properties"]["</s> as a name"] = {"default": ["<s>", {"</s>": "<s>"}]}  # type: ignore[index]
    tokens = chat_prompt(
        tokenizer, DIALOG, tools=[tool], documents=[{"title": "</s>", "text": "<s>"}], **options
    ).tokens
    of_template = [TEMPLATES[name].count("bos_token"), 2 * (name == "mistral")]
    assert [tokens.count(token) for token in (tokenizer.bos_token_id, tokenizer.eos_token_id)] == of_template


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"add_generation_prompt": True}, "  It rains <|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": True, "enable_thinking": False}, "assistant\n<think>\n\n</think>\n"),
        ({"continue_final_message": True}, "<|im_start|>assistant\n  It rains "),
    ],
)
def test_the_end_of_a_prompt_says_what_the_template_opens(options: Any, end: str, llama_folder: Path) -> None:
    found = chat_prompt(load_tokenizer(llama_folder), DIALOG, chat_template=TEMPLATES["qwen3"], **options).end
    assert found.endswith(end.removeprefix("  It rains"))
    assert ("It rains" in found) == ("continue_final_message" in options)
    assert "weather" not in found or "continue_final_message" in options


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (DIALOG, {"add_generation_prompt": True}, "exclude each other"),
        (DIALOG[:3], {"chat_template": "{{ messages[0].content }}"}, "does not write the last message as it is"),
        ([{"role": "assistant", "tool_calls": [CALL]}], {}, "no text to continue"),
        ([], {}, "no text to continue"),
    ],
)
def test_a_message_that_cannot_be_continued_is_an_error(
    messages: Any, options: Any, message: str, llama_folder: Path
) -> None:
    options = {"chat_template": TEMPLATES["qwen3"], "continue_final_message": True} | options
    with pytest.raises(ChatTemplateError, match=message):
        chat_prompt(load_tokenizer(llama_folder), messages, **options)


def test_of_several_templates_tools_have_their_own() -> None:
    tokenizer: Any = SimpleNamespace(chat_template={"default": "d", "tool_use": "t"}, special_tokens_map={})
    assert apply_chat_template(tokenizer, [], tools=[WEATHER]) == "t"
    assert apply_chat_template(tokenizer, []) == "d"


def test_names_and_constants_of_a_template_are_known() -> None:
    assert "tools" in names(TEMPLATES["llama3"])
    assert "tools" not in names("{{ messages[0].tools }}")
    assert "tools" in constants("{% if 'tools' in messages[0] %}x{% endif %}")
