"""Folders with only a config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_configs import LLAMA_70B, MIXTRAL_8X7B
from small_llama import llama, make_checkpoint  # noqa: F401


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a changed config: ``make_config(config, **changes) -> folder``."""

    def make(config: dict[str, Any], **changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        return tmp_path

    return make


@pytest.fixture
def llama_70b(make_config: Callable[..., Path]) -> Path:
    return make_config(LLAMA_70B)


@pytest.fixture
def mixtral(make_config: Callable[..., Path]) -> Path:
    return make_config(MIXTRAL_8X7B)
