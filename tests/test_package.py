"""The package as a whole: what it exports, and what must not be in the tree."""

from __future__ import annotations

from pathlib import Path

import minifloat

ROOT = Path(__file__).parents[1]


def test_every_public_name_resolves_and_is_documented() -> None:
    for name in minifloat.__all__:
        assert getattr(minifloat, name) is not None
        assert name in dir(minifloat)


def test_nothing_shadows_the_kernels_package_that_transformers_looks_up() -> None:
    assert not (ROOT / "kernels").exists()
    assert not [path for folder in ("examples", "benchmarks", "scripts") for path in (ROOT / folder).rglob("kernels*")]
    assert not list((ROOT / "tests").rglob("__init__.py"))
