from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import Client, running

from minifloat.engine import Engine, EngineOptions
from minifloat.model.runtime.tokenizer import load_tokenizer

#: A minimal chat template, with a control token of the tokenizer.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}{{ '</s>' }}{% endfor %}"
    "{% if enable_thinking is defined %}[thinking {{ enable_thinking }}]{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(llama_folder: Path) -> Any:
    """A tokenizer with one token per byte and a chat template."""
    loaded = load_tokenizer(llama_folder)
    loaded.chat_template = TEMPLATE
    return loaded


@pytest.fixture(scope="module")
def client(tokenizer: Any) -> Iterator[Client]:
    """A client of a server whose engine repeats prompts."""
    with running(FakeEngine(tokenizer)) as running_client:
        yield running_client


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
    """The real engine, with a model of random weights."""
    return Engine(
        tiny_folder,
        EngineOptions(dtype="float32", kv_cache_memory=8 << 20, max_num_seqs=16, max_num_batched_tokens=128),
    )
