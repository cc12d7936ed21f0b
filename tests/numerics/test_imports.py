"""The modules of numerics that streaming code imports must load neither torch nor more than they need."""

from __future__ import annotations

import subprocess
import sys

import pytest


def heavy_modules_after(statement: str) -> list[str]:
    """Those of torch and numpy that a new interpreter has loaded after `statement`."""
    code = f"import sys; {statement}; print(*(m for m in ('numpy', 'torch') if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return result.stdout.split()


@pytest.mark.parametrize("module", ["", ".formats", ".granularity", ".scheme", ".cast_stats"])
def test_the_declarations_load_neither_torch_nor_numpy(module: str) -> None:
    assert heavy_modules_after(f"import minifloat.numerics{module}") == []


@pytest.mark.parametrize("module", ["divisor", "histogram"])
def test_the_numpy_modules_load_no_torch(module: str) -> None:
    assert heavy_modules_after(f"import minifloat.numerics.{module}") == ["numpy"]
