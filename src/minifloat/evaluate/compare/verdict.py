"""The verdict: whether a candidate is within stated bounds of the baseline, or how much more text would decide.

A bound is kept if the whole 95% interval keeps it and broken if the whole interval breaks it. If the bound lies in the
interval, the check passes within the margin where the whole interval ends within the bound and a margin that the
tolerance states (`Tolerance.margin`); otherwise it is undecided. So a candidate that keeps a bound exactly or better
fails with a probability of at most 2.5%, and one whose loss is the bound and the margin or more passes with at most
2.5%: the second is a test of non-inferiority, the upper one of the two one-sided tests (TOST) of D. J. Schuirmann, A
comparison of the two one-sided tests procedure and the power approach, J. Pharmacokinetics and Biopharmaceutics 15
(1987). A value just at a bound would otherwise stay undecided with any number of tokens.

Every text is judged by itself too, because a large text of prose would hide the damage to a small text of code. The
verdict passes only if every check does, so it passes a candidate that breaks a bound with at most the probability of a
single check, 2.5%, whatever the number of checks: the intersection-union test of R. L. Berger, Multiparameter
hypothesis testing and acceptance sampling, Technometrics 24 (1982). It fails if any check does, which by chance is the
more probable the more checks there are. So they fail by the method of S. Holm, A simple sequentially rejective multiple
test procedure, Scandinavian J. Statistics 6 (1979): the clearest of m checks is tested at 2.5% / m, the next one at
2.5% / (m - 1), and so on; a candidate that keeps every bound fails with at most 2.5%.

A check passes only with `FEWEST_UNITS` units that count for at least `FEWEST_EFFECTIVE` independent ones: with fewer
the intervals have not kept their coverage (benchmarks/coverage.py). Of prompts, the units are those that the baseline
answers well, because nothing is lost at others. Kinds of behavior (valid calls, right functions, ...) can fail the
verdict, but have too few prompts to have to pass by themselves: all good answers together must.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from minifloat.evaluate.compare.behavior import GOOD, Behavior, BehaviorShare
from minifloat.evaluate.compare.distributions import student_cdf, student_quantile
from minifloat.evaluate.compare.intervals import CONFIDENCE, Estimate, units_to_decide
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.summary import Summary

#: Units, and effective units, that a check needs in order to pass.
FEWEST_UNITS, FEWEST_EFFECTIVE = 15, 4.0
_LEVEL = (1 - CONFIDENCE) / 2
#: The share of tokens at which both models have the same most probable token.
SAME_TOP1 = "same top-1"
INCREASE = "perplexity increase"
MEAN_KL = "mean KL"
#: The same where only a lower bound is known: that it keeps its bound proves less.
LEAST_KL = "mean KL of at least"
#: Behind a quantity of behavior: by how much the candidate's share is smaller than the baseline's.
LOST = " lost"


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
        tokens: Tokens that were scored.
        few_units: Whether it would pass if it had more units.
        counted: What `tokens` are: of behavior, prompts.
    """

    text: str
    quantity: str
    estimate: Estimate
    bound: float
    limit: float
    outcome: Outcome
    within_margin: bool
    tokens_needed: int | None
    tokens: int = 0
    few_units: bool = False
    counted: str = "tokens"


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


def judge(
    summaries: Sequence[Summary], tolerance: Tolerance, *, kl: str = MEAN_KL, behavior: Behavior | None = None
) -> Verdict:
    """Check each summary, and the behavior if it was measured, against the bounds."""
    claims = [claim for summary in summaries for claim in _claims(summary, tolerance, kl)]
    claims += _behavior_claims(behavior, tolerance)
    broken = _rejected([claim.p_kept for claim in claims])
    checks = tuple(
        claim.checked(place in broken, len(claims))
        for place, claim in enumerate(claims)
        if claim.must_pass or place in broken
    )
    return Verdict(worst_outcome([check.outcome for check in checks]), tolerance, checks)


@dataclass(frozen=True)
class _Claim:
    """The claim that a quantity is at most a bound, or at least: then `sign` is -1.

    A claim that need not pass is only checked for being broken.
    """

    summary: Summary | BehaviorShare
    quantity: str
    estimate: Estimate
    bound: float
    margin: float
    sign: int = 1
    must_pass: bool = True

    @property
    def p_kept(self) -> float:
        """The probability of an interval so far beyond the bound if the quantity is on it."""
        estimate, bound = self._as_maximum()
        if math.isinf(estimate.value):
            return 0.0
        if not estimate.low > bound:
            return 1.0
        reach = estimate.value - estimate.low
        t = student_quantile(1 - _LEVEL, estimate.degrees) * (estimate.value - bound) / reach if reach else math.inf
        return 1 - student_cdf(t, estimate.degrees)

    def checked(self, broken: bool, checks: int) -> Check:
        """Return the check; `broken`: the bound is surely broken, as one of so many checks."""
        estimate, bound = self._as_maximum()
        needed, few, outcome = None, False, Outcome.FAILED if broken else Outcome.UNDECIDED
        if not broken and estimate.low <= bound and estimate.high <= bound + self.margin:
            few = not _enough(self.summary, estimate)
            outcome = Outcome.UNDECIDED if few else Outcome.PASSED
        within = outcome is Outcome.PASSED and estimate.high > bound
        if outcome is Outcome.UNDECIDED:
            needed = self._tokens_needed(few, checks)
        return Check(
            text=self.summary.name,
            quantity=self.quantity,
            estimate=self.estimate,
            bound=self.bound,
            limit=self.bound + self.sign * self.margin,
            outcome=outcome,
            within_margin=within,
            tokens_needed=needed,
            tokens=self.summary.tokens,
            few_units=few,
            counted="tokens" if isinstance(self.summary, Summary) else "prompts",
        )

    def _as_maximum(self) -> tuple[Estimate, float]:
        return (self.estimate, self.bound) if self.sign > 0 else (self.estimate.negated(), -self.bound)

    def _tokens_needed(self, few: bool, checks: int) -> int | None:
        """Return about how many tokens would decide, those that were scored among them."""
        summary, (estimate, bound) = self.summary, self._as_maximum()
        have = max(summary.units, 1)
        if few:
            effective = estimate.effective_units or have
            units = max(FEWEST_UNITS, math.ceil(have * FEWEST_EFFECTIVE / effective), have + 1)
            return math.ceil(units * summary.tokens / have)
        degrees = estimate.degrees
        strictness = student_quantile(1 - _LEVEL / checks, degrees) / student_quantile(1 - _LEVEL, degrees)
        needed = units_to_decide(estimate, bound, have, self.margin, strictness)
        return None if needed is None else math.ceil(needed * summary.tokens / have)


def _claims(summary: Summary, tolerance: Tolerance, kl: str) -> list[_Claim]:
    increase = summary.perplexity_ratio.mapped(lambda ratio: ratio - 1)
    most, least, share = tolerance.max_ppl_increase, tolerance.min_same_top1, tolerance.margin
    return [
        _Claim(summary, INCREASE, increase, most, share * most),
        _Claim(summary, kl, summary.kl_mean, tolerance.max_kl, share * tolerance.max_kl),
        _Claim(summary, SAME_TOP1, summary.same_top1, least, share * (1 - least), sign=-1),
    ]


def _behavior_claims(behavior: Behavior | None, tolerance: Tolerance) -> list[_Claim]:
    """Return the claims of all good answers, and of each kind, which has too few prompts to have to pass by itself."""
    most = tolerance.max_behavior_loss
    return [
        _Claim(
            share,
            f"{share.quantity}{LOST}",
            share.difference.negated(),
            most,
            tolerance.margin * most,
            must_pass=share.quantity == GOOD,
        )
        for share in (behavior.shares if behavior is not None else ())
    ]


def _enough(summary: Summary | BehaviorShare, estimate: Estimate) -> bool:
    effective = summary.units if estimate.effective_units is None else estimate.effective_units
    return summary.units >= FEWEST_UNITS and effective >= FEWEST_EFFECTIVE


def _rejected(p_values: Sequence[float]) -> set[int]:
    """Return the places of the hypotheses that Holm's method rejects."""
    rejected: set[int] = set()
    for place in sorted(range(len(p_values)), key=p_values.__getitem__):
        if p_values[place] > _LEVEL / (len(p_values) - len(rejected)):
            break
        rejected.add(place)
    return rejected
