from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import Client, running

from minifloat.serve.text import load_tokenizer

#: As small as chat templates get, with a control token of the tokenizer.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}{{ '</s>' }}{% endfor %}"
    "{% if enable_thinking is defined %}[thinking {{ enable_thinking }}]{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(llama_folder: Path) -> Any:
    """One token per byte, with a chat template."""
    made = load_tokenizer(llama_folder)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def client(tokenizer: Any) -> Iterator[Client]:
    """A server that repeats prompts."""
    with running(FakeEngine(tokenizer)) as made:
        yield made
