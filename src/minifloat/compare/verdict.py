"""The verdict: whether a candidate is within stated bounds of the baseline, or how much more text would decide.

A bound is kept if the whole 95% interval keeps it and broken if the whole interval breaks it; otherwise the check is
undecided. Every text is judged by itself too, because a large text of prose would hide the damage to a small text of
code.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from minifloat.compare.intervals import Estimate, units_to_decide
from minifloat.compare.summary import Summary
from minifloat.errors import UsageError

#: The share of tokens at which both models have the same most probable token.
SAME_TOP1 = "same top-1"
MEAN_KL = "mean KL"
#: The same where only a lower bound is known: that it keeps its bound proves less.
LEAST_KL = "mean KL of at least"


class Outcome(enum.Enum):
    """The result of a check or a verdict, and the exit status of the command for it."""

    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "not enough data"

    @property
    def exit_code(self) -> int:
        """Exit status: 0, 1 or 3. Status 2 is a usage error."""
        return {Outcome.PASSED: 0, Outcome.FAILED: 1, Outcome.UNDECIDED: 3}[self]


@dataclass(frozen=True)
class Tolerance:
    """The bounds that a candidate has to keep.

    Attributes:
        max_ppl_increase: Largest relative increase of perplexity; 0.01 is 1%.
        max_kl: Largest mean KL divergence in nats per token.
        min_same_top1: Smallest fraction of tokens at which both models have the same most probable token. The default
            lies between the schemes of 8 bits, which kept 93.7% or more, and those of 4 bits, which kept 90.6% or less
            (two models, four texts: docs/results.md, "What each scheme costs").

    Raises:
        UsageError: If a bound is below 0 or NaN, or if the fraction is above 1.
    """

    max_ppl_increase: float = 0.01
    max_kl: float = 0.02
    min_same_top1: float = 0.92

    def __post_init__(self) -> None:
        if not (self.max_ppl_increase >= 0 and self.max_kl >= 0 and 0 <= self.min_same_top1 <= 1):
            raise UsageError(f"a tolerance is at least 0, and a share of tokens at most 100%; got {self}")


@dataclass(frozen=True)
class Check:
    """One bound on one text.

    Attributes:
        text: Name of the text.
        quantity: ``"perplexity increase"``, `MEAN_KL`, `LEAST_KL` or `SAME_TOP1`.
        estimate: The measured quantity.
        bound: The bound.
        outcome: Whether the estimate keeps the bound.
        tokens_needed: About how many tokens of this text would decide; None if the check is decided, or if the number
            cannot be estimated.
    """

    text: str
    quantity: str
    estimate: Estimate
    bound: float
    outcome: Outcome
    tokens_needed: int | None


@dataclass(frozen=True)
class Verdict:
    """The verdict on a candidate, with its checks.

    Attributes:
        outcome: Failed if any check failed, else undecided if any is undecided, else passed.
        tolerance: The bounds.
        checks: Three per text, and three for all texts together where there are several.
    """

    outcome: Outcome
    tolerance: Tolerance
    checks: tuple[Check, ...]

    @property
    def unmet(self) -> tuple[Check, ...]:
        """The checks with the same outcome as the verdict; none if the verdict is passed."""
        if self.outcome is Outcome.PASSED:
            return ()
        return tuple(check for check in self.checks if check.outcome is self.outcome)


def worst_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Return failed if any outcome is failed, else undecided if any is undecided, else passed."""
    order = (Outcome.FAILED, Outcome.UNDECIDED, Outcome.PASSED)
    return min(outcomes, key=order.index, default=Outcome.PASSED)


def judge(summaries: Sequence[Summary], tolerance: Tolerance, *, kl: str = MEAN_KL) -> Verdict:
    """Check each summary against the bounds.

    Args:
        summaries: The texts.
        tolerance: The bounds.
        kl: `LEAST_KL` if the KL divergences are lower bounds.
    """
    checks = tuple(check for summary in summaries for check in _checks(summary, tolerance, kl))
    return Verdict(worst_outcome([check.outcome for check in checks]), tolerance, checks)


def _checks(summary: Summary, tolerance: Tolerance, kl: str) -> list[Check]:
    increase = summary.perplexity_ratio.mapped(lambda ratio: ratio - 1)
    return [
        _check(summary, "perplexity increase", increase, tolerance.max_ppl_increase, at_most=True),
        _check(summary, kl, summary.kl_mean, tolerance.max_kl, at_most=True),
        _check(summary, SAME_TOP1, summary.same_top1, tolerance.min_same_top1, at_most=False),
    ]


def _check(summary: Summary, quantity: str, estimate: Estimate, bound: float, *, at_most: bool) -> Check:
    kept = estimate.high <= bound if at_most else estimate.low >= bound
    broken = estimate.low > bound if at_most else estimate.high < bound
    if math.isinf(estimate.value):
        kept, broken = False, True
    outcome = Outcome.PASSED if kept else Outcome.FAILED if broken else Outcome.UNDECIDED
    units = units_to_decide(estimate, bound, summary.units) if outcome is Outcome.UNDECIDED else None
    needed = None if units is None else math.ceil(units * summary.tokens / summary.units)
    return Check(summary.name, quantity, estimate, bound, outcome, needed)
