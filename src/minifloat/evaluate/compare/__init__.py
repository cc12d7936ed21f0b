"""Comparison of a quantized model with its baseline on the same tokens, with a verdict.

Names are resolved on first use, so that commands can list options without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifloat.evaluate.compare.evaluate import compare_models as compare_models
    from minifloat.evaluate.compare.intervals import Estimate as Estimate
    from minifloat.evaluate.compare.options import CompareOptions as CompareOptions
    from minifloat.evaluate.compare.options import ServedOptions as ServedOptions
    from minifloat.evaluate.compare.options import Tolerance as Tolerance
    from minifloat.evaluate.compare.result import CandidateResult as CandidateResult
    from minifloat.evaluate.compare.result import Comparison as Comparison
    from minifloat.evaluate.compare.summary import Summary as Summary
    from minifloat.evaluate.compare.verdict import Outcome as Outcome
    from minifloat.evaluate.compare.verdict import Verdict as Verdict

_MODULES = {
    "evaluate": ("compare_models",),
    "intervals": ("Estimate",),
    "options": ("CompareOptions", "ServedOptions", "Tolerance"),
    "result": ("CandidateResult", "Comparison"),
    "summary": ("Summary",),
    "verdict": ("Outcome", "Verdict"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
