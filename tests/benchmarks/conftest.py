"""Modules of `benchmarks`, which are scripts: fixtures of their names."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _module(name: str) -> Any:
    """Return a fixture: the module of a name."""

    @pytest.fixture(name=name)
    def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        monkeypatch.syspath_prepend(BENCHMARKS)
        return importlib.import_module(name)

    return module


decode, decode_models, decode_report = map(_module, ("decode", "decode_models", "decode_report"))
gpu_report, gpu_run, linear_report, linear_shapes = map(
    _module, ("gpu_report", "gpu_run", "linear_report", "linear_shapes")
)
moe, serve, serve_process = map(_module, ("moe", "serve", "serve_process"))
