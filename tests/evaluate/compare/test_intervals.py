"""Intervals: their coverage on simulated data, scipy's intervals, and degenerate data."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from modes import full

from minifloat.evaluate.compare.intervals import (
    FEWEST_UNITS,
    Estimate,
    mean_interval,
    paired_mean_interval,
    quantile_interval,
    sums_by_unit,
    units_to_decide,
)

Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def kl_of_documents(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw skewed values of tokens, in documents with different means and lengths."""
    sizes = rng.integers(50, 256, count)
    level = np.exp(rng.normal(0, 0.3, count))
    return np.array([(k * rng.lognormal(-7, 1.2, n)).sum() for k, n in zip(level, sizes, strict=True)]), sizes * 1.0


def changes_of_likelihood(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    sizes = rng.integers(50, 256, count)
    level = rng.normal(0.004, 0.003, count)
    return np.array([(k + rng.normal(0, 0.08, n)).sum() for k, n in zip(level, sizes, strict=True)]), sizes * 1.0


def agreements(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    sizes = rng.integers(50, 256, count)
    return rng.binomial(sizes, np.clip(0.97 + rng.normal(0, 0.01, count), 0, 1)) * 1.0, sizes * 1.0


@pytest.mark.parametrize("draw", [kl_of_documents, full(changes_of_likelihood), full(agreements)])
def test_95_of_100_intervals_of_a_mean_contain_the_true_mean(draw: Draw) -> None:
    rng = np.random.default_rng(1)
    sums, sizes = draw(rng, 100_000)
    truth = sums.sum() / sizes.sum()
    found = [mean_interval(*draw(rng, 40)) for _ in range(500)]
    assert 0.93 <= np.mean([interval.low <= truth <= interval.high for interval in found]) <= 0.97


def test_95_of_100_intervals_of_a_quantile_contain_the_true_quantile() -> None:
    rng = np.random.default_rng(2)
    hits = []
    truth = float(np.quantile(rng.lognormal(-7, 1.2, (1_000_000,)) * np.exp(rng.normal(0, 0.3, 1_000_000)), 0.9))
    for _ in range(500):
        levels = np.exp(rng.normal(0, 0.3, 60)).repeat(100)
        values = levels * rng.lognormal(-7, 1.2, 6000)
        interval = quantile_interval(values, np.arange(60).repeat(100), 60, 0.9)
        hits.append(interval.low <= truth <= interval.high)
    assert 0.93 <= np.mean(hits) <= 0.97


def test_tokens_of_one_document_do_not_count_as_independent() -> None:
    rng = np.random.default_rng(3)
    levels = rng.normal(0, 1, 20)
    by_document = mean_interval(levels * 100, np.full(20, 100.0))
    as_if_single = mean_interval(levels.repeat(100), np.ones(2000))
    width = by_document.high - by_document.low
    assert width > 5 * (as_if_single.high - as_if_single.low)
    assert width == pytest.approx(2 * 2.093 * levels.std(ddof=1) / math.sqrt(20), rel=0.15)  # Student's t, 19 degrees


def test_an_interval_of_a_mean_is_close_to_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    sums, sizes = kl_of_documents(np.random.default_rng(4), 200)
    found = mean_interval(sums, sizes)
    other = stats.bootstrap(
        (sums, sizes), lambda x, n, axis: x.sum(axis) / n.sum(axis), paired=True, rng=np.random.default_rng(0)
    ).confidence_interval
    width = other.high - other.low
    assert found.low == pytest.approx(other.low, abs=0.2 * width)
    assert found.high == pytest.approx(other.high, abs=0.2 * width)


def test_the_paired_interval_equals_scipys_bca_interval() -> None:
    stats = pytest.importorskip("scipy.stats", reason="compares the interval with SciPy's")
    generator = np.random.default_rng(3)
    changes, sizes = generator.lognormal(size=60) - 1, generator.integers(5, 50, size=60).astype(float)
    for divisor in (np.ones(60), sizes):
        expected = stats.bootstrap(
            (changes, divisor),
            lambda change, size, axis=-1: change.sum(axis) / size.sum(axis),
            paired=True,
            n_resamples=20000,
            rng=np.random.default_rng(4),
        ).confidence_interval
        found, width = paired_mean_interval(changes, divisor), expected.high - expected.low
        assert abs(found.low - expected.low) < 0.05 * width
        assert abs(found.high - expected.high) < 0.05 * width


def test_intervals_of_rare_losses_have_their_coverage() -> None:
    generator = np.random.default_rng(0)
    truth, items, inside = -0.04, 200, 0
    for _ in range(200):
        changes = generator.choice([-1.0, 0.0, 1.0], p=[0.06, 0.92, 0.02], size=items)
        estimate = paired_mean_interval(changes, np.ones(items))
        inside += estimate.low <= truth <= estimate.high
    assert 0.91 <= inside / 200 <= 0.985


def test_the_same_data_give_the_same_interval() -> None:
    data = kl_of_documents(np.random.default_rng(5), 30)
    assert mean_interval(*data) == mean_interval(*data)


def test_units_with_equal_means_have_an_interval_of_width_zero() -> None:
    sizes = np.arange(1.0, 21)
    assert mean_interval(np.zeros(20), sizes) == Estimate(0, 0, 0)
    assert mean_interval(sizes, sizes) == Estimate(1, 1, 1)


def test_a_few_units_have_a_mean_but_no_interval() -> None:
    few = mean_interval(np.zeros(FEWEST_UNITS - 1), np.ones(FEWEST_UNITS - 1))
    assert few.value == 0
    assert not few.known
    assert math.isnan(few.high)
    assert not quantile_interval(np.arange(10.0), np.zeros(10, dtype=np.int64), 1, 0.5).known


def test_with_an_infinite_unit_there_is_no_interval() -> None:
    sums = np.ones(20)
    sums[3] = math.inf
    assert mean_interval(sums, np.ones(20)).value == math.inf
    assert not mean_interval(sums, np.ones(20)).known


def test_an_interval_contains_the_mean_if_one_unit_differs_from_all_others() -> None:
    sums = np.zeros(30)
    sums[0] = 100
    interval = mean_interval(sums, np.ones(30))
    assert interval.low <= interval.value <= interval.high
    assert interval.high > interval.value


def test_draws_of_equal_units_do_not_make_the_interval_huge() -> None:
    wins = np.zeros(20)
    wins[0], wins[1:3] = 1, -1
    interval = mean_interval(wins, np.ones(20))
    assert -1 <= interval.low < -0.05 < interval.high <= 1


def test_sums_are_by_unit() -> None:
    assert sums_by_unit(np.array([True, True, False]), np.array([0, 2, 2]), 3).tolist() == [1, 0, 1]


def test_twice_the_distance_needs_a_quarter_of_the_units() -> None:
    estimate = Estimate(0.5, 0.375, 1.0)
    assert units_to_decide(estimate, 0.75, 10) == 40  # the upper half is 0.5 wide, and the bound 0.25 away
    assert units_to_decide(estimate, 0.625, 10) == 160
    assert units_to_decide(estimate, 0.4375, 10) == 40
    assert units_to_decide(estimate, 0.5, 10) is None
    assert units_to_decide(Estimate(0.5, math.nan, math.nan), 0.75, 10) is None
    assert units_to_decide(estimate, 0.5, 10, margin=0.25) == 40  # the upper half has to shrink to the margin
    # 0.0625 above the bound: the lower half, 0.125, is nearer to it than the upper half to the end of the margin
    assert units_to_decide(estimate, 0.4375, 10, margin=0.1875) == 40
    assert units_to_decide(Estimate(0.5, math.nan, math.nan), 0.5, 10, margin=0.25) is None


def test_an_estimate_is_mapped_and_clipped_with_its_ends() -> None:
    assert Estimate(0, -1, 1).mapped(math.exp) == Estimate(1, math.exp(-1), math.e)
    assert Estimate(0.99, 0.97, 1.01).clipped(0, 1) == Estimate(0.99, 0.97, 1)
    unknown = Estimate(0.99, math.nan, math.nan)
    assert unknown.clipped(0, 1) is unknown
