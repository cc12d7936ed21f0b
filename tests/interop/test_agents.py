"""Agents of other people's clients and frameworks against the server: OpenAI's, Anthropic's, pydantic-ai and others.

The model has random weights and one token per byte, or is that of the folder in MINIFLOAT_AGENTS_MODEL. `required` and
`strict` make it call tools with valid arguments all the same, until it answers or calls the one that ends the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served, served
from tools import run_script

pytestmark = pytest.mark.timeout(1200)

#: A small form of the template of Hermes.
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }} {% endfor %}</tools>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def server(make_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    scratch = tmp_path_factory.mktemp("agents")
    folder, options = Path(os.environ.get("MINIFLOAT_AGENTS_MODEL", "")), ["--kv-cache-memory", "256MiB"]
    if folder == Path():
        folder = make_llama(scratch / "random", max_position_embeddings=32768)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        options += ["--dtype", "float32"]
    with served(folder, scratch / "log", *options) as running:
        yield running


@pytest.mark.parametrize(
    "agent",
    [
        "openai, chat",
        "openai, responses",
        "anthropic, messages",
        "anthropic, tool runner",
        "pydantic-ai, chat",
        "pydantic-ai, responses",
        "pydantic-ai, messages",
        "smolagents",
        "langchain, chat",
        "langchain, responses",
        "llm",
    ],
)
def test_an_agent_runs_to_its_end(server: Served, agent: str, tmp_path: Path) -> None:
    request = {"agent": agent, "url": server.url, "model": "served"}
    (line,) = run_script("agents", "in_agents.py", request, tmp_path, timeout=300)
    assert line["error"] is None, f"{line['error']}\n{server.output[-2000:]}"
    assert line["answer"] in ("yes", "no")
    if agent.startswith(("openai", "anthropic", "llm")):  # without a tool that ends the run
        assert len(line["calls"]) == 3
