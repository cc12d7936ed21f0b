"""Conversations with an engine that says what a test wants, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fake_engine import INFO, FakeEngine

from minifloat.engine import Request

#: A small form of the templates of Hermes and Qwen.
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }} {% endfor %}</tools>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for call in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def call(name: str, arguments: str) -> str:
    """Return a call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def saying(tokenizer: Any, turns: Sequence[str]) -> FakeEngine:
    """Return an engine that says the next text in each turn of the assistant, and the last one from then on."""
    said = [tokenizer(text, add_special_tokens=False).input_ids for text in turns]

    def says(request: Request) -> Sequence[int]:
        turn = tokenizer.decode(request.prompt).count("assistant: ") - 1
        return list(said[min(turn, len(said) - 1)])

    engine = FakeEngine(tokenizer, says=says)
    engine.info = replace(INFO, max_model_len=8192)
    return engine
