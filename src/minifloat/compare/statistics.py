"""How sure a figure is: 95% confidence intervals, by resampling documents.

Tokens of one document are alike, so it is documents (or windows of them) that are drawn, with all their tokens; and the
two models see the same documents, so what is drawn is their difference. Both make intervals of a text's length honest:
those of single tokens would be too narrow, those of two separate perplexities far too wide.

Means are ratios of sums over units, ``sum(x) / sum(n)``, and get a studentized bootstrap: of the usual ones it is the
one that keeps its coverage with 20 units of a skewed quantity, which KL divergences are. Quantiles get Woodruff's
interval: that of the fraction of tokens below, read backwards.

Sources: B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), section 12.5; P. Hall, Theoretical comparison
of bootstrap confidence intervals, Annals of Statistics 16 (1988); R. S. Woodruff, Confidence intervals for medians and
other position measures, JASA 47 (1952).
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
_SEED = 0
#: A draw whose units are all alike has no standard error but rounding, next to that of the sample.
_DEGENERATE = 1e-6
#: Draws times units that are held at a time.
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
    generator = np.random.default_rng(_SEED)
    batch = max(_BATCH_ELEMENTS // count, 1)
    studentized: list[FloatArray] = []
    for start in range(0, _DRAWS, batch):
        size = min(batch, _DRAWS - start)
        times = generator.multinomial(count, np.full(count, 1 / count), size=size).astype(np.float64)
        shifts = times @ residuals / (times @ sizes)  # of the mean; residuals keep the digits that sums would lose
        errors = _standard_error(times, residuals, sizes, shifts)
        studentized.append(np.divide(shifts, errors, out=np.zeros(size), where=errors > _DEGENERATE * error))
    tails = np.quantile(np.concatenate(studentized), [(1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2])
    low, high = mean - tails * error
    return Estimate(mean, float(min(low, mean)), float(max(high, mean)))


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
