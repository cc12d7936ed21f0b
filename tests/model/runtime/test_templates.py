"""Chat templates: the text of transformers, bounded, and errors that say what a template does wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minifloat.errors import ChatTemplateError
from minifloat.model.runtime.templates import apply_chat_template
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
