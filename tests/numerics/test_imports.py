"""Tests that the modules of numerics for streaming code do not load torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


def heavy_modules_after(statement: str) -> list[str]:
    """Return which of numpy and torch a new interpreter has loaded after `statement`."""
    code = f"import sys; {statement}; print(*(m for m in ('numpy', 'torch') if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return result.stdout.split()


@pytest.mark.parametrize("module", ["", ".formats", ".granularity", ".scheme", ".cast_stats"])
def test_modules_of_declarations_load_neither_torch_nor_numpy(module: str) -> None:
    assert heavy_modules_after(f"import minifloat.numerics{module}") == []


@pytest.mark.parametrize("module", ["divisor", "histogram"])
def test_modules_of_numpy_arithmetic_load_no_torch(module: str) -> None:
    assert heavy_modules_after(f"import minifloat.numerics.{module}") == ["numpy"]
