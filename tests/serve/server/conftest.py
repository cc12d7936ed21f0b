from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import Client, running

from minifloat.runtime.tokenizer import load_tokenizer
from minifloat.serve.engine import Engine

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


@pytest.fixture(scope="session")
def tiny_folder(make_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few thousand random weights, with a context of 512 tokens and a chat template."""
    folder: Path = make_llama(
        tmp_path_factory.mktemp("served") / "tiny", max_position_embeddings=512, initializer_range=0.3
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def tiny(tiny_folder: Path) -> Engine:
    """The real engine, on a model of no meaning."""
    return Engine(tiny_folder, dtype="float32", kv_cache_memory=8 << 20, max_num_seqs=16, max_num_batched_tokens=128)
