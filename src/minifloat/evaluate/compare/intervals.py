"""95% confidence intervals of everything that a comparison measures.

Intervals are of units of text (documents, or windows that were cut from them), each with all its tokens, because the
tokens of one document are alike. Both models see the same units, so the quantity is the difference between the models.
Neighbouring units are alike too (`minifloat.evaluate.compare.series`), so they count for less than their number.

The interval depends on the kind of quantity:

- Means are ratios of sums over units, ``sum(x) / sum(n)``. Each end is the farther one of two intervals: a studentized
  bootstrap over blocks of units, and Student's t with a correction for skewness. Neither alone kept its coverage with
  12 correlated units, nor with 12 skewed ones; `benchmarks/coverage.py` measures both together.
- Fractions (same top-1) are means whose interval also contains the binomial interval of the effective number of tokens,
  as surveys use it. So it has a width where all tokens agree.
- Quantiles get Woodruff's interval: the interval of the fraction of tokens below the quantile, read backwards.
- Mean differences of task items get a bias-corrected and accelerated bootstrap (BCa). Of items that are right or wrong,
  two models differ on few. A draw without these has no spread, and the studentized bootstrap divides by the spread.
- Differences of the shares of prompts that two models answer well get the score interval of Tango, which keeps its
  coverage with few prompts, and has a width where none differs.
- Task scores that are not functions of a mean get a percentile bootstrap, which computes the score of every draw.
- Fractions of prompts get Wilson's interval.

Sources: B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), sections 12.5 and 14.3; B. Efron, Better
bootstrap confidence intervals, JASA 82 (1987); P. Hall, On the removal of skewness by transformation, JRSS B 54 (1992);
E. L. Korn, B. I. Graubard, Confidence intervals for proportions with small expected number of positive counts estimated
from survey data, Survey Methodology 24 (1998); T. Tango, Equivalence test and confidence interval for the difference in
proportions for the paired-sample design, Statistics in Medicine 17 (1998); R. S. Woodruff, Confidence intervals for
medians and other position measures, JASA 47 (1952); E. B. Wilson, Probable inference, the law of succession, and
statistical inference, JASA 22 (1927).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from minifloat.evaluate.compare.distributions import binomial_ends, solved, student_quantile
from minifloat.evaluate.compare.series import BlockDraws, FloatArray, IntArray, Moments, Stratum

CONFIDENCE = 0.95
#: With fewer units an interval would say more about the method than about the model.
FEWEST_UNITS = 8

_TAILS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
_NORMAL_REACH = NormalDist().inv_cdf(_TAILS[1])
#: BCa reads quantiles that lie further out than the ends of the interval.
_PAIRED_DRAWS = 4000
#: A percentile bootstrap computes a score from all items in each draw, which is slow.
_PERCENTILE_DRAWS = 1000
_SEED = 0
#: Below this skewness the correction for it is rounding.
_SYMMETRIC = 1e-6
#: Draws times units (or kinds of items) that are held at a time.
_BATCH_ELEMENTS = 2**22


@dataclass(frozen=True)
class Estimate:
    """A measured value and its 95% confidence interval.

    Attributes:
        low: Lower end of the interval; NaN where there are too few units for an interval.
        high: Upper end of the interval; NaN where there are too few units for an interval.
        effective_units: How many independent units would say as much; None where units were not counted.
        degrees: Degrees of freedom of the interval.
    """

    value: float
    low: float
    high: float
    effective_units: float | None = None
    degrees: float = math.inf

    @property
    def known(self) -> bool:
        return not math.isnan(self.low)

    def mapped(self, function: Callable[[float], float]) -> Estimate:
        """Return the estimate of an increasing function of the value."""
        return replace(self, value=function(self.value), low=function(self.low), high=function(self.high))

    def negated(self) -> Estimate:
        return replace(self, value=0 - self.value, low=0 - self.high, high=0 - self.low)

    def clipped(self, low: float, high: float) -> Estimate:
        """Return the estimate with its interval cut to the range of possible values."""
        if not self.known:
            return self
        return replace(self, low=min(max(self.low, low), high), high=min(max(self.high, low), high))


def sums_by_unit(values: npt.NDArray[np.generic], units: IntArray, count: int) -> FloatArray:
    """Sum values ``[T]`` by the unit of each, which is 0 to ``count - 1``; returns ``[count]``."""
    return np.asarray(np.bincount(units, weights=values.astype(np.float64), minlength=count), dtype=np.float64)


def mean_interval(sums: FloatArray, sizes: FloatArray, strata: Sequence[Stratum] | None = None) -> Estimate:
    """Estimate the mean ``sum(sums) / sum(sizes)`` over units; without strata, over the documents of one text."""
    mean = float(sums.sum() / sizes.sum())
    if len(sums) < FEWEST_UNITS or not np.isfinite(sums).all():
        return Estimate(mean, math.nan, math.nan)
    return _mean_interval(Moments(sums, sizes, strata or one_text(sums)))


def one_text(units: FloatArray) -> list[Stratum]:
    """Return the strata of units that are documents of one text."""
    return [Stratum(len(units), adjacent=False)]


def _mean_interval(moments: Moments) -> Estimate:
    """Return the union of the bootstrap over blocks and of Student's t, corrected for skewness."""
    if not moments.error:
        return Estimate(moments.value, moments.value, moments.value, moments.effective, moments.degrees)
    blocks = BlockDraws(moments)
    low_tail, high_tail = np.quantile(blocks.studentized, _TAILS) * blocks.error
    reach = student_quantile(_TAILS[1], moments.degrees)
    above, below = (-moments.error * _without_skewness(sign * reach, moments.skewness) for sign in (-1, 1))
    low, high = moments.value + min(-high_tail, below, 0), moments.value + max(-low_tail, above, 0)
    return Estimate(moments.value, float(low), float(high), moments.effective, moments.degrees)


def _without_skewness(t: float, skewness: float) -> float:
    """Return where Hall's transformation of a studentized mean is t: it removes the skewness, and is monotone."""
    if abs(skewness) < _SYMMETRIC:
        return t
    return 3 / skewness * (math.cbrt(1 + skewness * (t - skewness / 6)) - 1)


def proportion_interval(hits: FloatArray, sizes: FloatArray, strata: Sequence[Stratum] | None = None) -> Estimate:
    """Estimate the fraction ``sum(hits) / sum(sizes)`` of tokens; the interval has a width at 0 and at 1 too.

    The number of tokens is divided by the design effect: the variance of the fraction over that of independent tokens.
    As Korn and Graubard do it, it is also lowered for the few degrees of freedom of the variance.
    """
    if len(hits) < FEWEST_UNITS:
        return Estimate(float(hits.sum() / sizes.sum()), math.nan, math.nan)
    moments, tokens = Moments(hits, sizes, strata or one_text(hits)), float(sizes.sum())
    mean, fraction = _mean_interval(moments), min(max(moments.value, 0.0), 1.0)
    binomial = fraction * (1 - fraction) / tokens
    design_effect = max(moments.error**2 / binomial, 1.0) if binomial > 0 else 1.0
    effective = tokens / design_effect * (_NORMAL_REACH / student_quantile(_TAILS[1], moments.degrees)) ** 2
    low, high = binomial_ends(fraction * effective, effective, _TAILS[0])
    return replace(mean, low=min(mean.low, low), high=max(mean.high, high)).clipped(0, 1)


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


def paired_share_interval(better: int, worse: int, count: int) -> Estimate:
    """Estimate a difference of two shares of the same items by Tango's score interval; it has a width at 0 too.

    Args:
        better: Items that are right only the second time.
        worse: Items that are right only the first time.
        count: All items.
    """
    value = (better - worse) / count
    if count < FEWEST_UNITS:
        return Estimate(value, math.nan, math.nan)
    low, high = (
        2 * solved(lambda x: -_tango_score(2 * x - 1, better, worse, count), sign * _NORMAL_REACH) - 1
        for sign in (-1, 1)
    )
    return Estimate(value, min(low, value), max(high, value))


def _tango_score(difference: float, better: int, worse: int, count: int) -> float:
    """Return how many standard errors the items are above a difference of shares, at its most likely shares."""
    linear = (2 * count - better + worse) * difference - better - worse
    product = -worse * difference * (1 - difference)
    share = (math.sqrt(max(linear * linear - 8 * count * product, 0.0)) - linear) / (4 * count)  # of `worse`
    variance = count * (2 * share + difference * (1 - difference))
    return (better - worse - count * difference) / math.sqrt(max(variance, 1e-300))


def percentile_interval(value: float, count: int, statistic: Callable[[list[int]], float]) -> Estimate:
    """Return a value with the interval of a percentile bootstrap over items."""
    if count < FEWEST_UNITS:
        return Estimate(value, math.nan, math.nan)
    generator = np.random.default_rng(_SEED)
    draws = [statistic(generator.integers(count, size=count).tolist()) for _ in range(_PERCENTILE_DRAWS)]
    low, high = np.quantile(draws, _TAILS)
    return Estimate(value, float(low), float(high))


def quantile_interval(values: FloatArray, units: IntArray, strata: Sequence[Stratum], fraction: float) -> Estimate:
    """Estimate the value below which `fraction` of the tokens lie, with Woodruff's interval."""
    value, count = float(np.quantile(values, fraction)), sum(stratum.count for stratum in strata)
    if count < FEWEST_UNITS or not np.isfinite(values).all():
        return Estimate(value, math.nan, math.nan)
    sizes = np.bincount(units, minlength=count).astype(np.float64)
    below = proportion_interval(sums_by_unit(values <= value, units, count), sizes, strata)
    shift = fraction - below.value  # of values that are equal, more than the fraction are not above
    low, high = np.quantile(values, np.clip([below.low + shift, below.high + shift], 0, 1))
    return replace(below, value=value, low=float(min(low, value)), high=float(max(high, value)))


def fraction_interval(count: int, total: int) -> Estimate:
    """Return the fraction ``count / total`` with Wilson's interval."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    fraction, spread = count / total, z * z / total
    middle = (fraction + spread / 2) / (1 + spread)
    half = math.sqrt(fraction * (1 - fraction) * spread + spread * spread / 4) / (1 + spread)
    return Estimate(fraction, max(middle - half, 0.0), min(middle + half, 1.0))


def units_to_decide(
    estimate: Estimate, bound: float, count: int, margin: float = 0.0, strictness: float = 1.0
) -> int | None:
    """Return about how many units would decide whether a value is at most `bound`.

    Either the interval, made wider by `strictness`, excludes the bound, or it ends below ``bound + margin``; the
    smaller number is returned. The width of an interval shrinks with the square root of the number of units. With a
    margin the number is at most that of an interval as wide as half the margin, because no value is farther than that
    from both ends of the margin.
    """
    if not estimate.known:
        return None
    value, above, below = estimate.value, estimate.high - estimate.value, estimate.value - estimate.low
    routes = [(above, bound + margin - value), (strictness * below, value - bound)]
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
