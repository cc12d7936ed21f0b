"""Intervals: their coverage on simulated data, scipy's intervals, and degenerate data.

The coverage of correlated and of skewed units is in `test_coverage.py`, and at length in `benchmarks/coverage.py`.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from modes import full

from minifloat.evaluate.compare.distributions import binomial_ends, student_cdf, student_quantile
from minifloat.evaluate.compare.intervals import (
    FEWEST_UNITS,
    Estimate,
    mean_interval,
    paired_mean_interval,
    paired_share_interval,
    proportion_interval,
    quantile_interval,
    sums_by_unit,
    units_to_decide,
)
from minifloat.evaluate.compare.series import Stratum, block_length

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
    assert 0.94 <= np.mean([interval.low <= truth <= interval.high for interval in found]) <= 0.99


@pytest.mark.parametrize(("better", "worse", "count"), [(0, 0, 40), (0, 1, 40), (3, 2, 40), (12, 2, 50), (0, 40, 40)])
def test_a_difference_of_shares_is_1_96_standard_errors_from_its_ends(better: int, worse: int, count: int) -> None:
    """The shares are the most likely ones with the difference of the end, by a search over a grid."""
    found = paired_share_interval(better, worse, count)
    for end, sign in ((found.low, 1), (found.high, -1)):
        if abs(end) == pytest.approx(1):
            continue
        less = np.linspace(max(0, -end), min(1, (1 - end) / 2), 400_001)[1:-1]  # share of `worse`
        rest = np.maximum(1 - 2 * less - end, 1e-300)
        likelihood = worse * np.log(less) + better * np.log(less + end) + (count - better - worse) * np.log(rest)
        at = less[likelihood.argmax()]
        error = math.sqrt((2 * at + end - end * end) / count)
        assert ((better - worse) / count - end) / error == pytest.approx(sign * 1.96, abs=2e-3)


def test_a_difference_of_shares_is_that_of_the_literature_and_keeps_its_coverage() -> None:
    known = paired_share_interval(12, 2, 50)
    assert (known.value, known.low, known.high) == (
        0.2,
        pytest.approx(0.0611, abs=1e-4),
        pytest.approx(0.3447, abs=1e-4),
    )
    assert math.isnan(paired_share_interval(1, 0, FEWEST_UNITS - 1).low)
    rng = np.random.default_rng(3)
    for worse, better in ((0.11, 0.0), (0.16, 0.05), (0.05, 0.05)):
        draws = rng.multinomial(40, [better, worse, 1 - better - worse], 2000)[:, :2]
        kinds, times = np.unique(draws, axis=0, return_counts=True)
        found = [paired_share_interval(int(more), int(less), 40) for more, less in kinds]
        missed = [[each.low > better - worse, each.high < better - worse] for each in found]
        assert (np.average(missed, axis=0, weights=times) < 0.045).all()


def test_95_of_100_intervals_of_a_quantile_contain_the_true_quantile() -> None:
    rng = np.random.default_rng(2)
    hits = []
    truth = float(np.quantile(rng.lognormal(-7, 1.2, (1_000_000,)) * np.exp(rng.normal(0, 0.3, 1_000_000)), 0.9))
    for _ in range(500):
        levels = np.exp(rng.normal(0, 0.3, 60)).repeat(100)
        values = levels * rng.lognormal(-7, 1.2, 6000)
        interval = quantile_interval(values, np.arange(60).repeat(100), [Stratum(60, False)], 0.9)
        hits.append(interval.low <= truth <= interval.high)
    assert 0.94 <= np.mean(hits) <= 0.99


def test_tokens_of_one_document_do_not_count_as_independent() -> None:
    rng = np.random.default_rng(3)
    levels = rng.normal(0, 1, 20)
    by_document = mean_interval(levels * 100, np.full(20, 100.0))
    as_if_single = mean_interval(levels.repeat(100), np.ones(2000))
    width = by_document.high - by_document.low
    assert width == pytest.approx(2 * 2.447 * levels.std(ddof=1) / math.sqrt(20), rel=0.15)  # Student's t, 6 degrees
    assert as_if_single.effective_units is not None
    assert as_if_single.effective_units < 100  # the correlation is measured


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
    for sums, mean in ((np.zeros(20), 0), (sizes, 1)):
        found = mean_interval(sums, sizes)
        assert (found.value, found.low, found.high, found.effective_units) == (mean, mean, mean, 20)


def test_a_few_units_have_a_mean_but_no_interval() -> None:
    few = mean_interval(np.zeros(FEWEST_UNITS - 1), np.ones(FEWEST_UNITS - 1))
    assert few.value == 0
    assert not few.known
    assert math.isnan(few.high)
    assert not quantile_interval(np.arange(10.0), np.zeros(10, dtype=np.int64), [Stratum(1, False)], 0.5).known


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


# ------------------------------------------------------------------------------------------------- dependent units


def autoregressive(rng: np.random.Generator, count: int, rho: float) -> np.ndarray:
    """Draw a stationary series of variance 1."""
    noise = rng.normal(size=count) * math.sqrt(1 - rho * rho)
    series = np.empty(count)
    series[0] = rng.normal()
    for place in range(1, count):
        series[place] = rho * series[place - 1] + noise[place]
    return series


def test_the_block_length_is_that_of_patton_politis_and_white() -> None:
    """For an AR(1) series of correlation r, G = 2 r / (1 - r^2)^2 and g(0) = (1 + r) / (1 - r) / (1 - r^2) per unit."""
    rho, count = 0.6, 20_000
    series = autoregressive(np.random.default_rng(0), count, rho)
    length, variance = block_length(series - series.mean())
    long_run = (1 + rho) / (1 - rho)
    slope = 2 * rho / (1 - rho) ** 2
    best = (2 * slope**2 / (4 / 3 * long_run**2) * count) ** (1 / 3)
    assert length == pytest.approx(best, rel=0.15)
    assert variance == pytest.approx(long_run * count, rel=0.15)


def test_independent_units_are_drawn_one_by_one() -> None:
    lengths = [block_length(draw - draw.mean())[0] for draw in np.random.default_rng(1).normal(size=(50, 100))]
    assert np.median(lengths) == 1


@pytest.mark.parametrize(("rho", "low", "high"), [(0.0, 0.85, 1.0), (0.4, 0.33, 0.6), (0.8, 0.05, 0.2)])
def test_correlated_units_count_for_less(rho: float, low: float, high: float) -> None:
    """n units with a correlation r of neighbours are worth n (1 - r) / (1 + r): 0.43 n for 0.4, and 0.11 n for 0.8."""
    series = (autoregressive(np.random.default_rng(seed), 2000, rho) for seed in range(9))
    effective = [mean_interval(values, np.ones(2000), [Stratum(2000, True)]).effective_units for values in series]
    assert low < np.median([units / 2000 for units in effective if units is not None]) <= high


def test_windows_of_one_text_have_wider_intervals_than_documents() -> None:
    sums = np.random.default_rng(2).normal(size=30)
    windows, documents = (mean_interval(sums, np.ones(30), [Stratum(30, adjacent)]) for adjacent in (True, False))
    assert windows.high - windows.low > 1.2 * (documents.high - documents.low)


def test_the_distributions_are_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    for degrees in (1, 2, 2.7, 9, 300):
        assert student_quantile(0.975, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-9)
        assert student_cdf(-1.3, degrees) == pytest.approx(stats.t.cdf(-1.3, degrees), rel=1e-9)
    for hits, total in ((1, 30), (7000.3, 7786), (299, 300)):
        expected = stats.binomtest(int(hits), total).proportion_ci(0.95, "exact") if hits == int(hits) else None
        low, high = binomial_ends(hits, total, 0.025)
        assert low == pytest.approx(stats.beta.ppf(0.025, hits, total - hits + 1), rel=1e-9)
        assert high == pytest.approx(stats.beta.ppf(0.975, hits + 1, total - hits), rel=1e-9)
        assert expected is None or (low, high) == pytest.approx((expected.low, expected.high), rel=1e-6)
    assert binomial_ends(0, 3000, 0.05) == (0, pytest.approx(3 / 3000, rel=0.01))  # the rule of three


def test_a_fraction_without_exceptions_has_a_width() -> None:
    sizes = np.full(40, 255.0)
    all_agree, none = proportion_interval(sizes, sizes), proportion_interval(0 * sizes, sizes)
    assert all_agree.high == 1
    assert 0.999 < all_agree.low < 1 - 3 / sizes.sum()
    assert (none.low, none.high) == (0, pytest.approx(1 - all_agree.low))


def test_a_fraction_near_one_is_at_least_as_wide_as_a_binomial_one() -> None:
    sizes = np.full(24, 255.0)
    hits = sizes - (np.arange(24) == 3)
    found, exact = proportion_interval(hits, sizes), binomial_ends(hits.sum(), sizes.sum(), 0.025)
    assert found.low <= exact[0]
    assert found.high >= exact[1]


def test_tokens_that_disagree_together_count_for_fewer() -> None:
    sizes = np.full(40, 255.0)
    spread, together = np.full(40, 245.0), np.where(np.arange(40) % 4 == 0, 215.0, 255.0)
    assert spread.sum() == together.sum()
    one, other = proportion_interval(spread, sizes), proportion_interval(together, sizes)
    assert other.high - other.low > 2 * (one.high - one.low)
