"""What a start says: how far a large model is, and why a cache that does not fit into memory is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from minifloat.engine import Engine, EngineOptions, loading_log
from minifloat.errors import UsageError


def test_a_cache_for_which_there_is_no_memory_is_refused_with_what_is_free(llama_folder: Path) -> None:
    with pytest.raises(UsageError, match=r"^kv_cache_memory: 900\.00 GiB were asked for, and [\d.,]+ [MG]iB are free"):
        Engine(llama_folder, EngineOptions(kv_cache_memory=900 << 30))


def test_the_log_names_what_is_loaded_before_it_is_loaded(llama_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="minifloat"):
        Engine(llama_folder, EngineOptions(kv_cache_memory=1 << 20))
    assert any(f"loading {llama_folder.name}: " in message and "to cpu" in message for message in caplog.messages)


def test_the_log_counts_layers_every_few_seconds_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter([0.0, 1.0, 4.0, 5.5, 6.0, 11.0])
    monkeypatch.setattr(loading_log.time, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO, logger="minifloat"):
        assert list(loading_log.logged_layers("abcde")) == list("abcde")
    assert caplog.messages == ["loading: 2 of 5 layers", "loading: 4 of 5 layers"]
