"""How sure a figure is: 95% confidence intervals, by resampling documents.

Tokens of one document are alike, so it is documents (or windows of them) that are drawn, with all their tokens; and the
two models see the same documents, so what is drawn is their difference. Both make intervals of a text's length honest:
those of single tokens would be too narrow, those of two separate perplexities far too wide.

Means are ratios of sums over units, ``sum(x) / sum(n)``, and get a studentized bootstrap: of the usual ones it is the
one that keeps its coverage with 20 units of a skewed quantity, which KL divergences are. Items of tasks that are right
or wrong differ between two models in a few places and nowhere else, which it cannot take: a draw without them has no
spread to divide by. Their mean differences get a bias-corrected and accelerated one (BCa). Quantiles get Woodruff's
interval: that of the fraction of tokens below, read backwards.

Sources: B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), sections 12.5 and 14.3; B. Efron, Better
bootstrap confidence intervals, JASA 82 (1987); P. Hall, Theoretical comparison of bootstrap confidence intervals,
Annals of Statistics 16 (1988); R. S. Woodruff, Confidence intervals for medians and other position measures, JASA 47
(1952).
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

_DRAWS = 2000
#: BCa reads quantiles further out than the interval's.
_PAIRED_DRAWS = 4000
_SEED = 0
#: A draw whose units are all alike has no standard error but rounding, next to that of the sample.
_DEGENERATE = 1e-6
#: Draws times units (or kinds of items) that are held at a time.
_BATCH_ELEMENTS = 2**22


@dataclass(frozen=True)
class Estimate:
    """A measured value and its 95% confidence interval.

    Attributes:
        value: As measured.
        low: Lower end; NaN where there are too few units to tell.
        high: Upper end; likewise.
    """

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)

    def mapped(self, function: Callable[[float], float]) -> Estimate:
        """The same of a growing function of the value."""
        return Estimate(function(self.value), function(self.low), function(self.high))

    def clipped(self, low: float, high: float) -> Estimate:
        """With an interval that ends where values do."""
        if not self.known:
            return self
        return Estimate(self.value, min(max(self.low, low), high), min(max(self.high, low), high))


def sums_by_unit(values: npt.NDArray[np.generic], units: IntArray, count: int) -> FloatArray:
    """Sums of values ``[T]`` by the unit of each, 0 to ``count - 1``: ``[count]``."""
    return np.asarray(np.bincount(units, weights=values.astype(np.float64), minlength=count), dtype=np.float64)


def mean_interval(sums: FloatArray, sizes: FloatArray) -> Estimate:
    """The mean ``sum(sums) / sum(sizes)`` and its interval, by a studentized bootstrap over units.

    Args:
        sums: ``[U]`` sums of the quantity in each unit.
        sizes: ``[U]`` what was summed in each, for example its tokens; above 0.

    Returns:
        The interval has no width where all units have the same mean, and none is given for fewer than `FEWEST_UNITS`.
    """
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
    tails = np.quantile(np.concatenate(studentized), [(1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2])
    low, high = mean - tails * error
    return Estimate(mean, float(min(low, mean)), float(max(high, mean)))


def paired_mean_interval(changes: FloatArray, sizes: FloatArray) -> Estimate:
    """The mean ``sum(changes) / sum(sizes)`` of paired differences and its BCa interval, by a bootstrap over items.

    Args:
        changes: ``[N]`` candidate - baseline of each item.
        sizes: ``[N]`` what each counts; above 0.

    Returns:
        The interval has no width where all items have the same mean change, and none is given for fewer than
        `FEWEST_UNITS` items.
    """
    mean = float(changes.sum() / sizes.sum())
    if len(changes) < FEWEST_UNITS or not np.isfinite(changes).all():
        return Estimate(mean, math.nan, math.nan)
    # Items that are alike are drawn as one kind: right and wrong make three kinds of any number of items.
    kinds, alike = np.unique(np.stack([changes, sizes], axis=1), axis=0, return_counts=True)
    if (np.ptp(kinds[:, 0] / kinds[:, 1])) == 0:
        return Estimate(mean, mean, mean)
    draws = [times @ kinds[:, 0] / (times @ kinds[:, 1]) for times in _resamples(alike, _PAIRED_DRAWS)]
    without = (changes.sum() - kinds[:, 0]) / (sizes.sum() - kinds[:, 1])
    influence = np.average(without, weights=alike) - without
    skew = (alike @ influence**3) / (6 * (alike @ influence**2) ** 1.5)
    low, high = _bca(np.concatenate(draws), mean, float(skew))
    return Estimate(mean, min(low, mean), max(high, mean))


def _bca(draws: FloatArray, value: float, acceleration: float) -> tuple[float, float]:
    """The ends of the interval: quantiles of the draws, moved by their bias and by how their spread changes."""
    normal = NormalDist()
    rounding = 1e-12 * np.abs(draws).max()
    below = (np.mean(draws < value - rounding) + np.mean(draws <= value + rounding)) / 2
    bias = normal.inv_cdf(min(max(float(below), 1 / len(draws)), 1 - 1 / len(draws)))
    ends = []
    for tail in ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2):
        shift = bias + normal.inv_cdf(tail)
        ends.append(normal.cdf(bias + shift / (1 - acceleration * shift)))
    low, high = np.quantile(draws, ends)
    return float(low), float(high)


def _resamples(alike: FloatArray | IntArray, draws: int) -> Iterator[FloatArray]:
    """How often each kind of unit comes in draws with replacement of as many units as there are: batches ``[D, K]``.

    Args:
        alike: ``[K]`` units of each kind.
        draws: How many draws in all; the same ones every time.
    """
    generator = np.random.default_rng(_SEED)
    count = int(alike.sum())
    batch = max(_BATCH_ELEMENTS // len(alike), 1)
    for start in range(0, draws, batch):
        yield generator.multinomial(count, alike / count, size=min(batch, draws - start)).astype(np.float64)


def _standard_error(times: FloatArray, residuals: FloatArray, sizes: FloatArray, shifts: FloatArray) -> FloatArray:
    """Of the means of draws ``[D, U]``, each with its mean `shifts` off, by linearization: ``[D]``."""
    squares = times @ residuals**2 - 2 * shifts * (times @ (residuals * sizes)) + shifts**2 * (times @ sizes**2)
    count = times.shape[1]
    errors: FloatArray = np.sqrt(np.maximum(squares, 0) * count / (count - 1)) / (times @ sizes)
    return errors


def quantile_interval(values: FloatArray, units: IntArray, count: int, fraction: float) -> Estimate:
    """The value below which `fraction` of the tokens lie, and its interval.

    Args:
        values: ``[T]`` of each token.
        units: ``[T]`` the unit of each.
        count: Units.
        fraction: Between 0 and 1.
    """
    value = float(np.quantile(values, fraction))
    if count < FEWEST_UNITS or not np.isfinite(values).all():
        return Estimate(value, math.nan, math.nan)
    sizes = np.bincount(units, minlength=count).astype(np.float64)
    residuals = sums_by_unit(values <= value, units, count) - fraction * sizes
    error = _standard_error(np.ones((1, count)), residuals, sizes, np.zeros(1))[0]
    reach = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
    low, high = np.quantile(values, np.clip([fraction - reach, fraction + reach], 0, 1))
    return Estimate(value, float(min(low, value)), float(max(high, value)))


def units_to_decide(estimate: Estimate, bound: float, count: int) -> int | None:
    """About how many units would put the bound outside of the interval, which shrinks with the root of their number.

    None where the value lies on the bound, or nothing is known of its spread.
    """
    distance = abs(estimate.value - bound)
    if not estimate.known or distance == 0:
        return None
    width = estimate.high - estimate.value if bound > estimate.value else estimate.value - estimate.low
    return max(math.ceil(count * (width / distance) ** 2), count)
