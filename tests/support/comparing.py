"""`compare_models` and `compare_served` with their options as keywords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minifloat.evaluate import compare
from minifloat.evaluate.compare import CompareOptions, Comparison, ServedOptions


def compare_models(
    baseline: Any, candidates: Any, data: Any = (), *, progress: Callable[..., None] | None = None, **options: Any
) -> Comparison:
    """Compare models; greedy continuations are left out unless asked for."""
    chosen = CompareOptions(**{"prompts": 0} | options)
    return compare.compare_models(baseline, candidates, data, chosen, progress=progress)


def compare_served(baseline: Any, url: str, data: Any = (), **options: Any) -> Comparison:
    return compare.compare_served(baseline, url, data, ServedOptions(**options))
