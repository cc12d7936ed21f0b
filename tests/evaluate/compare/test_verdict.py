"""Verdicts on hand-made summaries."""

import math
from dataclasses import replace

import numpy as np
import pytest

from minifloat.errors import UsageError
from minifloat.evaluate.compare.intervals import Estimate
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.summary import Summary
from minifloat.evaluate.compare.verdict import Outcome, judge

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
    verdict = judge([summary(ratio=Estimate(1.02, 1.015, 1.025))], Tolerance())
    assert verdict.outcome is Outcome.FAILED
    assert verdict.outcome.exit_code == 1
    (check,) = verdict.unmet
    assert (check.quantity, check.bound, check.tokens_needed) == ("perplexity increase", 0.01, None)
    assert check.estimate.value == pytest.approx(0.02)


def test_a_check_whose_interval_contains_the_bound_estimates_the_tokens_needed() -> None:
    verdict = judge([summary(kl=Estimate(0.015, 0.01, 0.025))], Tolerance(margin=0))
    assert verdict.outcome is Outcome.UNDECIDED
    assert verdict.outcome.exit_code == 3
    (check,) = verdict.unmet
    assert check.tokens_needed == pytest.approx(
        4 * 25_500, rel=0.02
    )  # twice as near as the bound is: four times as many


def test_more_checks_need_a_clearer_break_of_a_bound_to_fail() -> None:
    """One of 9 checks that is beyond its bound by little more than the interval is no failure yet (Holm)."""
    broken = summary(kl=Estimate(0.0213, 0.0202, 0.0224))
    assert judge([broken], Tolerance(), kl="mean KL").checks[1].outcome is Outcome.UNDECIDED
    (check,) = judge([broken], Tolerance()).unmet
    assert check.tokens_needed is not None
    assert check.tokens_needed > check.tokens
    clear = summary(kl=Estimate(0.0216, 0.0204, 0.0228))
    assert judge([clear], Tolerance()).outcome is Outcome.FAILED
    assert judge([clear, summary("b")], Tolerance()).outcome is Outcome.UNDECIDED
    # of 6 checks the clearest fails, and the other one is the clearest of the 5 that are left
    verdict = judge([clear, summary("b", kl=Estimate(0.05, 0.04, 0.06))], Tolerance())
    assert [check.text for check in verdict.unmet] == ["text", "b"]


@pytest.mark.parametrize("breaking", [1, 3, 9])
def test_a_candidate_on_every_bound_fails_in_at_most_2_5_of_100(breaking: int) -> None:
    rng, failed, reach = np.random.default_rng(breaking), 0, 1.96 * 0.0003
    for _ in range(400):
        values = 0.02 + rng.normal(0, 0.0003, breaking)
        texts = [summary(str(place), kl=Estimate(v, v - reach, v + reach)) for place, v in enumerate(values)]
        failed += judge(texts, Tolerance()).outcome is Outcome.FAILED
    assert failed <= 400 * 0.025 + 5


@pytest.mark.parametrize(
    ("units", "effective", "outcome"),
    [
        (15, 4.0, Outcome.PASSED),
        (14, 14.0, Outcome.UNDECIDED),
        (100, 3.9, Outcome.UNDECIDED),
        (15, None, Outcome.PASSED),
    ],
)
def test_a_pass_needs_enough_independent_units(units: int, effective: float | None, outcome: Outcome) -> None:
    text = replace(summary(kl=Estimate(0.01, 0.005, 0.015, effective)), units=units)
    verdict = judge([text], Tolerance())
    assert verdict.outcome is outcome
    for check in verdict.unmet:
        assert check.few_units
        assert check.tokens_needed is not None
        assert check.tokens < check.tokens_needed < 2 * check.tokens


def test_too_few_independent_units_do_not_hide_a_failure() -> None:
    bad = replace(summary(kl=Estimate(0.5, 0.4, 0.6, 2.0)), units=8)
    assert judge([bad], Tolerance()).outcome is Outcome.FAILED


def test_the_margin_needs_fewer_tokens_than_to_exclude_the_bound() -> None:
    (check,) = judge([summary(kl=Estimate(0.015, 0.01, 0.025))], Tolerance()).unmet
    # the upper half, 0.010, has to shrink to 0.022 - 0.015
    assert check.tokens_needed == pytest.approx((0.010 / 0.007) ** 2 * 25_500, rel=0.02)


@pytest.mark.parametrize(
    ("kl", "outcome", "within"),
    [
        (Estimate(0.0195, 0.018, 0.021), Outcome.PASSED, True),
        (Estimate(0.0205, 0.0199, 0.0219), Outcome.PASSED, True),  # above the bound, within the margin
        (Estimate(0.0195, 0.016, 0.0221), Outcome.UNDECIDED, False),  # ends beyond the margin
        (Estimate(0.0211, 0.0204, 0.0218), Outcome.FAILED, False),  # the bound is broken; the margin does not help
        (Estimate(0.015, 0.014, 0.016), Outcome.PASSED, False),
    ],
)
def test_an_interval_that_contains_the_bound_passes_if_it_ends_within_the_margin(
    kl: Estimate, outcome: Outcome, within: bool
) -> None:
    verdict = judge([summary(kl=kl)], Tolerance())
    check = verdict.checks[1]
    assert (check.outcome, check.within_margin, check.limit) == (outcome, within, pytest.approx(0.022))
    assert verdict.within_margin == ((check,) if within else ())


def test_the_margin_of_a_minimum_is_a_share_of_the_loss_that_it_allows() -> None:
    near = replace(summary(), same_top1=Estimate(0.921, 0.913, 0.929))
    (check,) = judge([near], Tolerance()).within_margin
    assert (check.quantity, check.limit) == ("same top-1", pytest.approx(0.92 - 0.1 * 0.08))
    (check,) = judge([near], Tolerance(margin=0.05)).unmet  # 0.916
    assert check.tokens_needed == pytest.approx((0.008 / 0.005) ** 2 * 25_500, rel=0.02)


def test_a_value_on_the_bound_needs_a_finite_number_of_tokens() -> None:
    on_it = [summary(kl=Estimate(0.02 + offset, 0.01, 0.03)) for offset in (0, 1e-9, -1e-9, 0.002, 0.001)]
    for check in (judge([one], Tolerance()).unmet[0] for one in on_it):
        assert check.tokens_needed is not None
        assert check.tokens_needed <= 25_500 * (0.011 / 0.001) ** 2 * 1.01  # at most that of half the margin
    assert judge(on_it[:1], Tolerance(margin=0)).unmet[0].tokens_needed is None


@pytest.mark.parametrize(("true_loss", "least_passed", "most_passed"), [(0.022, 0.0, 0.05), (0.02, 0.9, 1.0)])
def test_errors_of_a_verdict_at_the_ends_of_the_margin_are_rare(
    true_loss: float, least_passed: float, most_passed: float
) -> None:
    noise = np.random.default_rng(1).normal(0, 0.0003, size=2000)  # half the interval: 0.0006, under the margin
    values = true_loss + noise
    reach = 1.96 * 0.0003
    passed = [
        judge([summary(kl=Estimate(value, value - reach, value + reach))], Tolerance()).outcome is Outcome.PASSED
        for value in values
    ]
    assert least_passed <= np.mean(passed) <= most_passed


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
    with pytest.raises(UsageError, match="expected at least 0"):
        Tolerance(**bad)


@pytest.mark.parametrize("margin", [-0.1, 1.1, math.nan])
def test_a_margin_out_of_range_is_refused(margin: float) -> None:
    with pytest.raises(UsageError, match="margin: expected at least 0 and at most 1"):
        Tolerance(margin=margin)
