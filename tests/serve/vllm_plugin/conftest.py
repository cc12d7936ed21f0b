"""A stub of vLLM for the tests of the plugin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stub_vllm import Stub, install


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """A vLLM 0.32.0 on a CPU without AMX, in which nothing is registered."""
    yield from install(monkeypatch)
