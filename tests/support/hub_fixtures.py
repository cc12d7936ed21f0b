"""A hub with a trained model in shards, its cache in a folder of each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub

STORYBOOK = Path(__file__).parents[2] / "examples" / "storybook-4m"


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model as five shards: do not write into it."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("hub") / "storybook"
    AutoModelForCausalLM.from_pretrained(STORYBOOK, dtype="bfloat16").save_pretrained(folder, max_shard_size="2MB")
    for name in ("README.md", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((STORYBOOK / name).read_bytes())
    return folder


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """An empty hub that answers."""
    with FakeHub().serving() as fake:
        yield fake


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that commands run in, with the hub's cache."""
    return tmp_path_factory.mktemp("home")
