"""Verdicts on hand-made summaries."""

import math
from dataclasses import replace

import pytest

from minifloat.compare.intervals import Estimate
from minifloat.compare.summary import Summary
from minifloat.compare.verdict import Outcome, Tolerance, judge
from minifloat.errors import UsageError

EXACT = Estimate(0, 0, 0)


def summary(name: str = "text", ratio: Estimate | None = None, kl: Estimate | None = None) -> Summary:
    return Summary(
        name=name,
        unit="window",
        units=100,
        tokens=25_500,
        nbytes=1e5,
        baseline_perplexity=10,
        candidate_perplexity=10,
        perplexity_ratio=ratio or Estimate(1, 1, 1),
        baseline_bits_per_byte=1,
        candidate_bits_per_byte=1,
        kl_mean=kl or EXACT,
        kl_median=EXACT,
        kl_p99=EXACT,
        kl_p999=EXACT,
        kl_max=0,
        same_top1=Estimate(1, 1, 1),
        topk_overlap=Estimate(1, 1, 1),
        margins=(),
        kl_curve=(),
    )


def test_the_verdict_is_passed_if_whole_intervals_keep_all_bounds() -> None:
    verdict = judge([summary(kl=Estimate(0.01, 0.005, 0.02))], Tolerance())
    assert verdict.outcome is Outcome.PASSED
    assert verdict.outcome.exit_code == 0
    assert len(verdict.checks) == 3
    assert verdict.unmet == ()


def test_the_verdict_is_failed_if_a_whole_interval_breaks_a_bound() -> None:
    verdict = judge([summary(ratio=Estimate(1.02, 1.011, 1.03))], Tolerance())
    assert verdict.outcome is Outcome.FAILED
    assert verdict.outcome.exit_code == 1
    (check,) = verdict.unmet
    assert (check.quantity, check.bound, check.tokens_needed) == ("perplexity increase", 0.01, None)
    assert check.estimate.value == pytest.approx(0.02)


def test_a_check_whose_interval_contains_the_bound_estimates_the_tokens_needed() -> None:
    verdict = judge([summary(kl=Estimate(0.015, 0.01, 0.025))], Tolerance())
    assert verdict.outcome is Outcome.UNDECIDED
    assert verdict.outcome.exit_code == 3
    (check,) = verdict.unmet
    assert check.tokens_needed == pytest.approx(
        4 * 25_500, rel=0.02
    )  # twice as near as the bound is: four times as many


def test_a_check_without_an_interval_is_undecided_unless_the_value_is_infinite() -> None:
    unknown = Estimate(0.0, math.nan, math.nan)
    (check,) = judge([summary(kl=unknown)], Tolerance()).unmet
    assert (check.outcome, check.tokens_needed) == (Outcome.UNDECIDED, None)
    lost = Estimate(math.inf, math.nan, math.nan)
    assert judge([summary(kl=lost)], Tolerance()).outcome is Outcome.FAILED


def test_one_failed_text_fails_the_verdict() -> None:
    bad = summary("code", kl=Estimate(0.5, 0.4, 0.6))
    unsure = summary("dialogue", kl=Estimate(0.02, 0.01, 0.03))
    verdict = judge([summary(), unsure, bad], Tolerance())
    assert verdict.outcome is Outcome.FAILED
    assert [check.text for check in verdict.unmet] == ["code"]
    assert judge([summary(), unsure], Tolerance()).outcome is Outcome.UNDECIDED


def test_the_bound_on_the_same_top1_is_a_lower_bound() -> None:
    low = replace(summary(), same_top1=Estimate(0.9, 0.89, 0.91))
    assert judge([low], Tolerance()).unmet[0].quantity == "same top-1"
    assert judge([low], Tolerance(min_same_top1=0.85)).outcome is Outcome.PASSED


@pytest.mark.parametrize("bad", [{"max_kl": -1}, {"min_same_top1": 97}, {"max_ppl_increase": math.nan}])
def test_a_tolerance_out_of_range_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="a tolerance is at least 0"):
        Tolerance(**bad)
