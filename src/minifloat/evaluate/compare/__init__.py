"""Comparison of a quantized model with its baseline on the same tokens, with a verdict.

Names are resolved on first use: `options` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifloat.evaluate.compare.intervals import Estimate as Estimate
    from minifloat.evaluate.compare.options import CompareOptions as CompareOptions
    from minifloat.evaluate.compare.options import ServedOptions as ServedOptions
    from minifloat.evaluate.compare.options import Tolerance as Tolerance
    from minifloat.evaluate.compare.result import CandidateResult as CandidateResult
    from minifloat.evaluate.compare.result import Comparison as Comparison
    from minifloat.evaluate.compare.run import compare_models as compare_models
    from minifloat.evaluate.compare.served import compare_served as compare_served
    from minifloat.evaluate.compare.summary import Summary as Summary
    from minifloat.evaluate.compare.verdict import Outcome as Outcome
    from minifloat.evaluate.compare.verdict import Verdict as Verdict

_HOMES = {
    "CandidateResult": "result",
    "CompareOptions": "options",
    "Comparison": "result",
    "Estimate": "intervals",
    "Outcome": "verdict",
    "ServedOptions": "options",
    "Summary": "summary",
    "Tolerance": "options",
    "Verdict": "verdict",
    "compare_models": "run",
    "compare_served": "served",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
