"""Comparison of a quantized model with its baseline on the same tokens, with a verdict."""

from minifloat.evaluate.compare.evaluate import compare_models
from minifloat.evaluate.compare.intervals import Estimate
from minifloat.evaluate.compare.options import CompareOptions, ServedOptions
from minifloat.evaluate.compare.result import CandidateResult, Comparison
from minifloat.evaluate.compare.summary import Summary
from minifloat.evaluate.compare.verdict import Outcome, Tolerance, Verdict

__all__ = [
    "CandidateResult",
    "CompareOptions",
    "Comparison",
    "Estimate",
    "Outcome",
    "ServedOptions",
    "Summary",
    "Tolerance",
    "Verdict",
    "compare_models",
]
