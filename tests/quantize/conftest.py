"""Fixtures of `small_llama`, and text of random words, for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_words import write_words
from small_llama import llama, make_checkpoint  # noqa: F401


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("text"))
