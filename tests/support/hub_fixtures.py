"""Fixtures of a fake hub, a sharded trained model, and a home folder with the hub's cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub

STORYBOOK = Path(__file__).parents[2] / "examples" / "storybook-4m"


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model in five shards; tests must not write into the folder."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("hub") / "storybook"
    AutoModelForCausalLM.from_pretrained(STORYBOOK, dtype="bfloat16").save_pretrained(folder, max_shard_size="2MB")
    for name in ("README.md", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((STORYBOOK / name).read_bytes())
    return folder


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """A running fake hub without models."""
    with FakeHub().serving() as fake:
        yield fake


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of commands, which also holds the hub's cache."""
    return tmp_path_factory.mktemp("home")
