"""Comparison of a quantized model with its baseline on the same tokens, with a verdict."""

from minifloat.compare.evaluate import compare_models
from minifloat.compare.intervals import Estimate
from minifloat.compare.options import CompareOptions
from minifloat.compare.result import CandidateResult, Comparison
from minifloat.compare.summary import Summary
from minifloat.compare.verdict import Outcome, Tolerance, Verdict

__all__ = [
    "CandidateResult",
    "CompareOptions",
    "Comparison",
    "Estimate",
    "Outcome",
    "Summary",
    "Tolerance",
    "Verdict",
    "compare_models",
]
