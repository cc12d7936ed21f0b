"""The verdict: whether a candidate is within stated bounds of the baseline, or how much more text would decide.

A bound is kept if the whole 95% interval keeps it and broken if the whole interval breaks it. If the bound lies in the
interval, the check passes within the margin where the whole interval ends within the bound and a margin that the
tolerance states (`Tolerance.margin`); otherwise it is undecided. So a candidate that keeps a bound exactly or better
fails with a probability of at most 2.5%, and one whose loss is the bound and the margin or more passes with at most
2.5%: the second is a test of non-inferiority, the upper one of the two one-sided tests (TOST) of D. J. Schuirmann, A
comparison of the two one-sided tests procedure and the power approach, J. Pharmacokinetics and Biopharmaceutics 15
(1987). A value just at a bound would otherwise stay undecided with any number of tokens.

Every text is judged by itself too, because a large text of prose would hide the damage to a small text of code.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from minifloat.evaluate.compare.intervals import Estimate, units_to_decide
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.summary import Summary

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
class Check:
    """One bound on one text.

    Attributes:
        tokens_needed: About how many tokens of this text would decide; None if the check is decided, or if the number
            cannot be estimated.
    """

    text: str
    quantity: str
    estimate: Estimate
    bound: float
    limit: float
    outcome: Outcome
    within_margin: bool
    tokens_needed: int | None


@dataclass(frozen=True)
class Verdict:
    """The verdict on a candidate, with its checks."""

    outcome: Outcome
    tolerance: Tolerance
    checks: tuple[Check, ...]

    @property
    def unmet(self) -> tuple[Check, ...]:
        """The checks with the same outcome as the verdict; none if the verdict is passed."""
        if self.outcome is Outcome.PASSED:
            return ()
        return tuple(check for check in self.checks if check.outcome is self.outcome)

    @property
    def within_margin(self) -> tuple[Check, ...]:
        """The checks that are passed although their interval contains the bound."""
        return tuple(check for check in self.checks if check.within_margin)


def worst_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Return failed if any outcome is failed, else undecided if any is undecided, else passed."""
    order = (Outcome.FAILED, Outcome.UNDECIDED, Outcome.PASSED)
    return min(outcomes, key=order.index, default=Outcome.PASSED)


def judge(summaries: Sequence[Summary], tolerance: Tolerance, *, kl: str = MEAN_KL) -> Verdict:
    """Check each summary against the bounds."""
    checks = tuple(check for summary in summaries for check in _checks(summary, tolerance, kl))
    return Verdict(worst_outcome([check.outcome for check in checks]), tolerance, checks)


def _checks(summary: Summary, tolerance: Tolerance, kl: str) -> list[Check]:
    increase = summary.perplexity_ratio.mapped(lambda ratio: ratio - 1)
    top1, margin = tolerance.min_same_top1, tolerance.margin
    return [
        _check(summary, "perplexity increase", increase, tolerance.max_ppl_increase, margin),
        _check(summary, kl, summary.kl_mean, tolerance.max_kl, margin),
        _check_minimum(summary, SAME_TOP1, summary.same_top1, top1, margin * (1 - top1)),
    ]


def _check(summary: Summary, quantity: str, estimate: Estimate, bound: float, share: float) -> Check:
    """Check a bound that the quantity may not exceed; the margin is a share of it."""
    margin = bound * share
    outcome, within, needed = _decide(summary, estimate, bound, margin)
    return Check(summary.name, quantity, estimate, bound, bound + margin, outcome, within, needed)


def _check_minimum(summary: Summary, quantity: str, estimate: Estimate, bound: float, margin: float) -> Check:
    outcome, within, needed = _decide(summary, estimate.negated(), -bound, margin)
    return Check(summary.name, quantity, estimate, bound, bound - margin, outcome, within, needed)


def _decide(summary: Summary, estimate: Estimate, bound: float, margin: float) -> tuple[Outcome, bool, int | None]:
    """Return the outcome of an upper bound, whether the margin made it pass, and the tokens that would decide it."""
    if estimate.low > bound or math.isinf(estimate.value):
        return Outcome.FAILED, False, None
    if estimate.high <= bound:
        return Outcome.PASSED, False, None
    if estimate.high <= bound + margin:
        return Outcome.PASSED, True, None
    units = units_to_decide(estimate, bound, summary.units, margin)
    needed = None if units is None else math.ceil(units * summary.tokens / summary.units)
    return Outcome.UNDECIDED, False, needed
