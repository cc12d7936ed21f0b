"""Variance of a mean over units of text. Units that lie near each other are alike, and count for less.

Two estimates of the variance are made, neither of which is ever below that of independent units:

- `Moments` projects the units on a few cosines (E. Lazarus, D. J. Lewis, J. H. Stock, M. W. Watson, HAR inference,
  JBES 36 (2018)). The number of cosines depends on the number of units alone, so the quotient has Student's t
  distribution with so many degrees of freedom, whatever the correlation of near units is.
- `BlockDraws` draws blocks of adjacent units (moving blocks on a circle). Their length comes from the measured
  autocorrelation: D. N. Politis, H. White, Econometric Reviews 23 (2004), corrected by A. Patton, D. N. Politis,
  H. White, Econometric Reviews 28 (2009).

Units of several texts are strata: the texts are given, and each text varies by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: The units of a text: its documents, or the windows that were cut from few documents.
DOCUMENT, WINDOW = "document", "window"

#: Cosines for n units: this times n^(2/3). Windows cut from one text need few of them, because few cosines see the
#: correlation of near windows. Documents differ more, so theirs may be more. Both were chosen by coverage
#: (benchmarks/coverage.py).
_COSINES_OF_WINDOWS, _COSINES_OF_DOCUMENTS = 0.35, 0.8
_FEWEST_COSINES = 2
#: Few units show too little of the skewness of what they are drawn from. It is raised by the third power of this over
#: their number: by 30% for 15 units, by 1.6% for 40. Chosen by coverage too.
_SKEWNESS_NOT_SEEN = 10
#: Longer series are summed to at most this many groups of adjacent units.
_MOST_GROUPS = 256
_DRAWS = 2000
_SEED = 0
#: The standard error of a draw counts as 0 below this share of the sample's: such a draw holds only equal blocks, and
#: its standard error is rounding.
_DEGENERATE = 1e-6


@dataclass(frozen=True)
class Stratum:
    """The units of one text, in its order; `adjacent` if they are windows that were cut from longer documents."""

    count: int
    adjacent: bool


def kept(strata: Sequence[Stratum], mask: BoolArray) -> list[Stratum]:
    """Return the strata of the units in `mask`."""
    return [Stratum(int(mask[part].sum()), stratum.adjacent) for stratum, part in _parts(strata)]


def _parts(strata: Sequence[Stratum]) -> Iterator[tuple[Stratum, slice]]:
    """Yield the strata that have units, with their places."""
    start = 0
    for stratum in strata:
        if stratum.count:
            yield stratum, slice(start, start + stratum.count)
        start += stratum.count


def _grouped(values: FloatArray) -> FloatArray:
    """Sum adjacent units so that there are few groups."""
    size = -(-len(values) // _MOST_GROUPS)
    return values if size == 1 else np.add.reduceat(values, np.arange(0, len(values), size))


@dataclass(frozen=True)
class _Text:
    """The units of one text: how much each moves the text's mean, and the moments of this mean."""

    weight: float
    shifts: FloatArray
    sizes: FloatArray
    independent_variance: float
    cosines: int
    variance: float
    third: float

    @classmethod
    def of(cls, sums: FloatArray, sizes: FloatArray, weight: float, adjacent: bool) -> _Text:
        count, total = len(sums), float(sizes.sum())
        each = (sums - sums.sum() / total * sizes) / total
        independent = float(each @ each) * count / max(count - 1, 1)
        shifts, rate = _grouped(each), _COSINES_OF_WINDOWS if adjacent else _COSINES_OF_DOCUMENTS
        cosines = min(max(round(rate * len(shifts) ** (2 / 3)), _FEWEST_COSINES), max(len(shifts) - 1, 1))
        variance = max(_cosine_variance(shifts, cosines), independent)
        third = 0.0
        if independent > 0:  # the skewness of the mean falls with the root of the effective number of units
            skewness = (
                float(np.mean(each**3)) / float(np.mean(each**2)) ** 1.5 * (1 + (_SKEWNESS_NOT_SEEN / count) ** 3)
            )
            third = skewness / math.sqrt(count * independent / variance) * variance**1.5
        return cls(weight, shifts, _grouped(sizes), independent, cosines, variance, third)


def _cosine_variance(shifts: FloatArray, cosines: int) -> float:
    """Return the variance of the sum of a series that sums to 0, from its projections on cosines."""
    places = (np.arange(len(shifts)) + 0.5) / len(shifts)
    projections = math.sqrt(2) * np.cos(np.pi * np.arange(1, cosines + 1)[:, None] * places) @ shifts
    return float(np.mean(projections**2))


class Moments:
    """The mean ``sum(sums) / sum(sizes)`` over units, and the moments of this mean.

    Attributes:
        value: The mean.
        error: Its standard error, not below that of independent units.
        degrees: Degrees of freedom of the standard error.
        skewness: Skewness of the mean.
        effective: As many independent units would have this standard error.
    """

    def __init__(self, sums: FloatArray, sizes: FloatArray, strata: Sequence[Stratum]) -> None:
        total = float(sizes.sum())
        self.value = float(sums.sum()) / total
        self.texts = [
            _Text.of(sums[part], sizes[part], float(sizes[part].sum()) / total, stratum.adjacent)
            for stratum, part in _parts(strata)
        ]
        variances = [text.weight**2 * text.variance for text in self.texts]
        variance = sum(variances)
        self.error = math.sqrt(variance)
        # Satterthwaite's; without any variance the texts count by their sizes
        shares = variances if variance > 0 else [text.weight for text in self.texts]
        squares = sum(share**2 / text.cosines for share, text in zip(shares, self.texts, strict=True))
        self.degrees = sum(shares) ** 2 / squares
        self.skewness, self.effective = 0.0, float(len(sums))
        if variance > 0:
            self.skewness = sum(text.weight**3 * text.third for text in self.texts) / variance**1.5
            independent = sum(text.weight**2 * text.independent_variance for text in self.texts)
            self.effective *= independent / variance


class BlockDraws:
    """A studentized bootstrap of the mean of `moments` over blocks of adjacent units.

    Attributes:
        error: Standard error of the mean, from the autocorrelation of the units.
        studentized: Errors of the means of draws in standard errors of these draws.
    """

    def __init__(self, moments: Moments) -> None:
        shift, square = np.zeros(_DRAWS), np.zeros(_DRAWS)
        variance = 0.0
        for number, text in enumerate(moments.texts):
            length, series = block_length(text.shifts)
            variance += text.weight**2 * max(series, text.independent_variance)
            of_text, error = _draws(text, length, number)
            shift += text.weight * of_text
            square += (text.weight * error) ** 2
        self.error = math.sqrt(variance)
        errors = np.sqrt(square)
        clear = errors > _DEGENERATE * self.error
        self.studentized = np.divide(shift, errors, out=np.zeros(_DRAWS), where=clear)


def block_length(shifts: FloatArray) -> tuple[int, float]:
    """Return the length of blocks for a series that sums to 0, and the variance of its sum."""
    count = len(shifts)
    if count < 3 or not shifts.any():
        return 1, float(shifts @ shifts)
    run = max(5, math.ceil(math.sqrt(math.log10(count))))  # as many small correlations end the search
    most = min(math.ceil(math.sqrt(count)) + run, count - 1)
    covariances = np.array([shifts[lag:] @ shifts[: count - lag] for lag in range(most + 1)])
    small = np.abs(covariances[1:]) < 2 * math.sqrt(math.log10(count) / count) * covariances[0]
    ends = [lag for lag in range(len(small) - run + 1) if small[lag : lag + run].all()]
    large = np.flatnonzero(~small)
    last = ends[0] if ends else (int(large[-1]) + 1 if len(large) else 1)
    lags, width = np.arange(most + 1), min(2 * max(last, 1), most)
    weights = np.clip(2 * (1 - lags / width), 0, 1) * np.where(lags == 0, 1, 2)
    variance = float(weights @ covariances)
    slope = float(weights @ (lags * covariances))
    if variance <= 0:
        return 1, 0.0
    length = (1.5 * (slope / variance) ** 2 * count) ** (1 / 3)  # of circular blocks: 2 G^2 / (4/3 g^2)
    return max(round(min(length, 3 * math.sqrt(count), count / 3)), 1), variance * count / (count - 1)


def _draws(text: _Text, length: int, number: int) -> tuple[FloatArray, FloatArray]:
    """Return the errors of the mean of a text in each draw, and their standard errors."""
    count = len(text.shifts)
    blocks = max(-(-count // length), 2)
    size = text.sizes.sum()
    shifts, sizes = (_circular_sums(values, length) for values in (text.shifts * size, text.sizes))
    columns = np.stack([shifts, sizes, shifts**2, shifts * sizes, sizes**2], axis=1)
    drawn, length_drawn, squares, products, size_squares = (_block_counts(count, blocks, number) @ columns).T
    shift = drawn / length_drawn
    left = np.maximum(squares - 2 * shift * products + shift**2 * size_squares, 0)
    return shift, np.sqrt(left * blocks / (blocks - 1)) / length_drawn


def _circular_sums(values: FloatArray, length: int) -> FloatArray:
    """Return the sums of `length` consecutive values from each place on, the first following the last."""
    running = np.concatenate([[0.0], np.cumsum(np.concatenate([values, values[: length - 1]]))])
    sums: FloatArray = running[length:] - running[:-length]
    return sums


@functools.lru_cache(maxsize=16)
def _block_counts(count: int, blocks: int, number: int) -> FloatArray:
    """Return how often each of `count` blocks is in each draw of `blocks`, ``[D, count]``; equal calls draw equally."""
    starts = np.random.default_rng([_SEED, number]).integers(count, size=(_DRAWS, blocks))
    places = starts + count * np.arange(_DRAWS)[:, None]
    counts = np.bincount(places.ravel(), minlength=_DRAWS * count).reshape(_DRAWS, count)
    return counts.astype(np.float64)
