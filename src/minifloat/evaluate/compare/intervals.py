"""95% confidence intervals of everything that a comparison measures.

Intervals come from resampling documents (or windows of them), each with all its tokens, because the tokens of one
document are alike. Both models see the same documents, so the resampled quantity is the difference between the models.
Intervals from single tokens would be too narrow, and those of two separate perplexities far too wide.

The interval depends on the kind of quantity:

- Means are ratios of sums over units, ``sum(x) / sum(n)``, and get a studentized bootstrap. Of the usual bootstraps it
  is the one that keeps its coverage with 20 units of a skewed quantity, and KL divergences are skewed.
- Mean differences of task items get a bias-corrected and accelerated bootstrap (BCa). Of items that are right or wrong,
  two models differ on few. A draw without these has no spread, and the studentized bootstrap divides by the spread.
- Task scores that are not functions of a mean get a percentile bootstrap, which computes the score of every draw.
- Quantiles get Woodruff's interval: the interval of the fraction of tokens below the quantile, read backwards.
- Fractions of prompts get Wilson's interval.

Sources: B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), sections 12.5 and 14.3; B. Efron, Better
bootstrap confidence intervals, JASA 82 (1987); P. Hall, Theoretical comparison of bootstrap confidence intervals,
Annals of Statistics 16 (1988); R. S. Woodruff, Confidence intervals for medians and other position measures, JASA 47
(1952); E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

CONFIDENCE = 0.95
#: With fewer units an interval would say more about the method than about the model.
FEWEST_UNITS = 8

_TAILS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
_DRAWS = 2000
#: BCa reads quantiles that lie further out than the ends of the interval.
_PAIRED_DRAWS = 4000
#: A percentile bootstrap computes a score from all items in each draw, which is slow.
_PERCENTILE_DRAWS = 1000
_SEED = 0
#: The standard error of a draw counts as 0 below this share of the sample's: such a draw holds only equal units, and
#: its standard error is rounding.
_DEGENERATE = 1e-6
#: Draws times units (or kinds of items) that are held at a time.
_BATCH_ELEMENTS = 2**22


@dataclass(frozen=True)
class Estimate:
    """A measured value and its 95% confidence interval.

    Attributes:
        low: Lower end of the interval; NaN where there are too few units for an interval.
        high: Upper end of the interval; NaN where there are too few units for an interval.
    """

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)

    def mapped(self, function: Callable[[float], float]) -> Estimate:
        """Return the estimate of an increasing function of the value."""
        return Estimate(function(self.value), function(self.low), function(self.high))

    def negated(self) -> Estimate:
        """Return the estimate of the negative value."""
        return Estimate(-self.value, -self.high, -self.low)

    def clipped(self, low: float, high: float) -> Estimate:
        """Return the estimate with its interval cut to the range of possible values."""
        if not self.known:
            return self
        return Estimate(self.value, min(max(self.low, low), high), min(max(self.high, low), high))


def sums_by_unit(values: npt.NDArray[np.generic], units: IntArray, count: int) -> FloatArray:
    """Sum values ``[T]`` by the unit of each, which is 0 to ``count - 1``; returns ``[count]``."""
    return np.asarray(np.bincount(units, weights=values.astype(np.float64), minlength=count), dtype=np.float64)


def mean_interval(sums: FloatArray, sizes: FloatArray) -> Estimate:
    """Estimate the mean ``sum(sums) / sum(sizes)`` by a studentized bootstrap over units."""
    mean = float(sums.sum() / sizes.sum())
    count = len(sums)
    if count < FEWEST_UNITS or not np.isfinite(sums).all():
        return Estimate(mean, math.nan, math.nan)
    residuals = sums - mean * sizes
    if not residuals.any():
        return Estimate(mean, mean, mean)
    error = _standard_error(np.ones((1, count)), residuals, sizes, np.zeros(1))[0]
    studentized: list[FloatArray] = []
    for times in _resamples(np.ones(count), _DRAWS):
        shifts = times @ residuals / (times @ sizes)  # of the mean; residuals keep the digits that sums would lose
        errors = _standard_error(times, residuals, sizes, shifts)
        studentized.append(np.divide(shifts, errors, out=np.zeros(len(errors)), where=errors > _DEGENERATE * error))
    high_tail, low_tail = np.quantile(np.concatenate(studentized), _TAILS)
    low, high = mean - low_tail * error, mean - high_tail * error
    return Estimate(mean, float(min(low, mean)), float(max(high, mean)))


def paired_mean_interval(changes: FloatArray, sizes: FloatArray) -> Estimate:
    """Estimate the mean ``sum(changes) / sum(sizes)`` of paired differences by a BCa bootstrap over items."""
    mean = float(changes.sum() / sizes.sum())
    if len(changes) < FEWEST_UNITS or not np.isfinite(changes).all():
        return Estimate(mean, math.nan, math.nan)
    # Equal items are drawn as one kind: any number of items that are right or wrong makes only three kinds.
    kinds, counts = np.unique(np.stack([changes, sizes], axis=1), axis=0, return_counts=True)
    if (np.ptp(kinds[:, 0] / kinds[:, 1])) == 0:
        return Estimate(mean, mean, mean)
    draws = [times @ kinds[:, 0] / (times @ kinds[:, 1]) for times in _resamples(counts, _PAIRED_DRAWS)]
    without = (changes.sum() - kinds[:, 0]) / (sizes.sum() - kinds[:, 1])
    influence = np.average(without, weights=counts) - without
    skew = (counts @ influence**3) / (6 * (counts @ influence**2) ** 1.5)
    low, high = _bca(np.concatenate(draws), mean, float(skew))
    return Estimate(mean, min(low, mean), max(high, mean))


def percentile_interval(value: float, count: int, statistic: Callable[[list[int]], float]) -> Estimate:
    """Return a value with the interval of a percentile bootstrap over items."""
    if count < FEWEST_UNITS:
        return Estimate(value, math.nan, math.nan)
    generator = np.random.default_rng(_SEED)
    draws = [statistic(generator.integers(count, size=count).tolist()) for _ in range(_PERCENTILE_DRAWS)]
    low, high = np.quantile(draws, _TAILS)
    return Estimate(value, float(low), float(high))


def quantile_interval(values: FloatArray, units: IntArray, count: int, fraction: float) -> Estimate:
    """Estimate the value below which `fraction` of the tokens lie, with Woodruff's interval."""
    value = float(np.quantile(values, fraction))
    if count < FEWEST_UNITS or not np.isfinite(values).all():
        return Estimate(value, math.nan, math.nan)
    sizes = np.bincount(units, minlength=count).astype(np.float64)
    residuals = sums_by_unit(values <= value, units, count) - fraction * sizes
    error = _standard_error(np.ones((1, count)), residuals, sizes, np.zeros(1))[0]
    reach = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
    low, high = np.quantile(values, np.clip([fraction - reach, fraction + reach], 0, 1))
    return Estimate(value, float(min(low, value)), float(max(high, value)))


def fraction_interval(count: int, total: int) -> Estimate:
    """Return the fraction ``count / total`` with Wilson's interval."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    fraction, spread = count / total, z * z / total
    middle = (fraction + spread / 2) / (1 + spread)
    half = math.sqrt(fraction * (1 - fraction) * spread + spread * spread / 4) / (1 + spread)
    return Estimate(fraction, max(middle - half, 0.0), min(middle + half, 1.0))


def units_to_decide(estimate: Estimate, bound: float, count: int, margin: float = 0.0) -> int | None:
    """Return about how many units would decide whether a value is at most `bound`.

    Either the interval excludes the bound, or it ends below ``bound + margin``; the smaller number is returned. The
    width of an interval shrinks with the square root of the number of units. With a margin the number is at most that
    of an interval as wide as half the margin, because no value is farther than that from both ends of the margin.
    """
    if not estimate.known:
        return None
    value, above, below = estimate.value, estimate.high - estimate.value, estimate.value - estimate.low
    routes = [(above, bound + margin - value), (below, value - bound)]
    factors = [(width / distance) ** 2 for width, distance in routes if distance > 0]
    return max(math.ceil(count * min(factors)), count) if factors else None


def _bca(draws: FloatArray, value: float, acceleration: float) -> tuple[float, float]:
    """Return the ends of a BCa interval: quantiles of the draws, corrected for their bias and changing spread."""
    normal = NormalDist()
    rounding = 1e-12 * np.abs(draws).max()
    below = (np.mean(draws < value - rounding) + np.mean(draws <= value + rounding)) / 2
    bias = normal.inv_cdf(min(max(float(below), 1 / len(draws)), 1 - 1 / len(draws)))
    ends = []
    for tail in _TAILS:
        shift = bias + normal.inv_cdf(tail)
        ends.append(normal.cdf(bias + shift / (1 - acceleration * shift)))
    low, high = np.quantile(draws, ends)
    return float(low), float(high)


def _resamples(counts: FloatArray | IntArray, draws: int) -> Iterator[FloatArray]:
    """Draw all units with replacement, many times; yield how often each kind was drawn, in batches ``[D, K]``.

    The seed is fixed, so that equal calls yield equal draws.
    """
    generator = np.random.default_rng(_SEED)
    total = int(counts.sum())
    batch = max(_BATCH_ELEMENTS // len(counts), 1)
    for start in range(0, draws, batch):
        yield generator.multinomial(total, counts / total, size=min(batch, draws - start)).astype(np.float64)


def _standard_error(times: FloatArray, residuals: FloatArray, sizes: FloatArray, shifts: FloatArray) -> FloatArray:
    """Return the standard errors ``[D]`` of the means of draws, by linearization."""
    squares = times @ residuals**2 - 2 * shifts * (times @ (residuals * sizes)) + shifts**2 * (times @ sizes**2)
    count = times.shape[1]
    errors: FloatArray = np.sqrt(np.maximum(squares, 0) * count / (count - 1)) / (times @ sizes)
    return errors
