"""`compare_models` and `compare_served` with their options as keywords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minifloat.evaluate.compare import run, served
from minifloat.evaluate.compare.options import CompareOptions, ServedOptions
from minifloat.evaluate.compare.result import Comparison


def compare_models(
    baseline: Any, candidates: Any, data: Any = (), *, progress: Callable[..., None] | None = None, **options: Any
) -> Comparison:
    """Compare models; greedy continuations are left out unless asked for."""
    chosen = CompareOptions(**{"prompts": 0} | options)
    return run.compare_models(baseline, candidates, data, chosen, progress=progress)


def compare_served(baseline: Any, url: str, data: Any = (), **options: Any) -> Comparison:
    return served.compare_served(baseline, url, data, ServedOptions(**options))
