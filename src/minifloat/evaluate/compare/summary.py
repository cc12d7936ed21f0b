"""Summary of the scores of a text: means and quantiles over tokens, with their intervals.

Errors of keys and values, of rotary embeddings and of long sums grow with the number of tokens before a token. The mean
over a window hides this: half of a window's tokens are early ones. So the tokens of windows beyond `SHORT_WINDOW` are
grouped by their position too, and the later half of the windows is compared with their first quarter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minifloat.evaluate.compare.intervals import (
    Estimate,
    mean_interval,
    proportion_interval,
    quantile_interval,
    sums_by_unit,
)
from minifloat.evaluate.compare.metrics import TokenScores
from minifloat.evaluate.compare.series import WINDOW, BoolArray, FloatArray, IntArray, Stratum, kept
from minifloat.kernels.divergence import TOP_K

#: Largest number of tokens of a window for which positions are not reported.
SHORT_WINDOW = 512
#: Ends of the first two ranges; from there on the ends double.
_FIRST_ENDS = (128, 512)


@dataclass(frozen=True)
class PositionRange:
    """The tokens at a range of positions.

    Attributes:
        kl_mean: Mean KL divergence in nats per token.
    """

    low: int
    high: int
    units: int
    tokens: int
    kl_mean: Estimate


@dataclass(frozen=True)
class LateChange:
    """How much more the models differ late in the windows than early in them.

    Attributes:
        early_kl: Mean KL divergence of early tokens, in nats per token, of the units that have late tokens.
        late_kl: Mean KL divergence of late tokens, in nats per token.
        change: Late less early KL divergence in nats per token, each unit compared with itself. Units count by their
            late tokens.
    """

    early_end: int
    late_start: int
    early_kl: float
    late_kl: float
    change: Estimate

    @property
    def worse(self) -> bool:
        """Whether the whole interval of the change is above 0."""
        return self.change.known and self.change.low > 0


@dataclass(frozen=True)
class Positions:
    """The KL divergence of one text by position.

    Attributes:
        late: Comparison of late tokens with early tokens; None if no unit has both.
    """

    ranges: tuple[PositionRange, ...]
    late: LateChange | None


@dataclass(frozen=True)
class Units:
    """The units of scores: documents, or windows that were cut from them, in the order of their texts.

    Attributes:
        index: ``[T]``: the unit of each token.
    """

    index: IntArray
    count: int
    strata: tuple[Stratum, ...]

    @classmethod
    def of(cls, scores: TokenScores, texts: Sequence[tuple[int, str]]) -> Units:
        """Number the units of scores of several texts, given as the number of tokens and the name of the unit."""
        numbers, index = np.unique(scores.unit, return_inverse=True)
        ends = np.cumsum([tokens for tokens, _ in texts])
        counts = [len(np.unique(part)) for part in np.split(scores.unit, ends[:-1])]
        strata = tuple(Stratum(count, unit == WINDOW) for count, (_, unit) in zip(counts, texts, strict=True))
        return cls(index.astype(np.int64), len(numbers), strata)


def by_position(scores: TokenScores, units: Units) -> Positions | None:
    """Group scores by position; None if all windows are short (`SHORT_WINDOW`)."""
    longest = int(scores.position.max()) + 1
    if longest <= SHORT_WINDOW:
        return None
    ranges = []
    for low, high in _ranges(longest):
        inside = (scores.position >= low) & (scores.position <= high)
        if inside.any():
            sums, sizes = _of(inside, scores, units)
            used = sizes > 0
            kl = mean_interval(sums[used], sizes[used], kept(units.strata, used)).clipped(0, math.inf)
            ranges.append(PositionRange(low, high, int(used.sum()), int(inside.sum()), kl))
    return Positions(tuple(ranges), _late_change(scores, units, longest))


def _ranges(longest: int) -> list[tuple[int, int]]:
    """Return the first and last positions of ranges: 0 to 127, 128 to 511, 512 to 1023, 1024 to 2047, ..."""
    ends = list(_FIRST_ENDS)
    while ends[-1] < longest:
        ends.append(2 * ends[-1])
    ends[-1] = longest
    return [(low, end - 1) for low, end in zip((0, *ends), ends, strict=False)]


def _of(mask: BoolArray, scores: TokenScores, units: Units) -> tuple[FloatArray, FloatArray]:
    """Return for each unit the sum of the KL divergences of its tokens in `mask`, and their number."""
    index = units.index[mask]
    sizes = np.bincount(index, minlength=units.count).astype(np.float64)
    return sums_by_unit(scores.kl[mask], index, units.count), sizes


def _late_change(scores: TokenScores, units: Units, longest: int) -> LateChange | None:
    early_end, late_start = longest // 4, longest // 2
    early, early_sizes = _of(scores.position < early_end, scores, units)
    late, late_sizes = _of(scores.position >= late_start, scores, units)
    both = (early_sizes > 0) & (late_sizes > 0)
    if not both.any():
        return None
    early, early_sizes, late, late_sizes = (values[both] for values in (early, early_sizes, late, late_sizes))
    change = mean_interval(late - early / early_sizes * late_sizes, late_sizes, kept(units.strata, both))
    return LateChange(
        early_end, late_start, float(early.sum() / early_sizes.sum()), float(late.sum() / late_sizes.sum()), change
    )


#: Lower ends of the bins of `MarginBin`, in nats between the baseline's first and second choice.
MARGIN_EDGES = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
#: Fractions of the tokens in `Summary.kl_curve`.
CURVE_FRACTIONS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 0.9995, 0.9999)


@dataclass(frozen=True)
class MarginBin:
    """Tokens at which the baseline's margin, the distance of its first and second choice, lies in one range.

    A different first choice is no loss where the baseline's margin is small, and a loss where it is large.

    Attributes:
        low: Smallest margin of the bin in nats.
        same_top1: Fraction of these tokens at which both models have the same first choice; NaN without tokens.
        kl_mean: Mean KL divergence of these tokens in nats; NaN without tokens.
    """

    low: float
    high: float
    tokens: int
    same_top1: float
    kl_mean: float


@dataclass(frozen=True)
class Summary:
    """Summary of the scores of one text, or of all texts.

    Attributes:
        nbytes: Number of UTF-8 bytes of the scored tokens.
        kl_mean: Mean KL divergence in nats per token.
        positions: The KL divergence by position in the window; None if all windows are short.
        effective_units: As many independent units say as much; of perplexity, KL and same top-1 the least.
    """

    name: str
    unit: str
    units: int
    tokens: int
    nbytes: float
    baseline_perplexity: float
    candidate_perplexity: float
    perplexity_ratio: Estimate
    baseline_bits_per_byte: float
    candidate_bits_per_byte: float
    kl_mean: Estimate
    kl_median: Estimate
    kl_p99: Estimate
    kl_p999: Estimate
    kl_max: float
    same_top1: Estimate
    topk_overlap: Estimate
    margins: tuple[MarginBin, ...]
    kl_curve: tuple[tuple[float, float], ...]
    positions: Positions | None = None
    effective_units: float | None = None


def perplexity(nll: FloatArray) -> float:
    """Return exp of the mean of negative log-likelihoods in nats; Inf where it is too large for a float."""
    return _exp(float(nll.mean()))


def bits_per_byte(nll: FloatArray, nbytes: float) -> float:
    """Convert negative log-likelihoods in nats to bits per byte of the text."""
    return float(nll.sum()) / math.log(2) / nbytes


def summarize(
    name: str, scores: TokenScores, nbytes: float, texts: Sequence[tuple[int, str]], vocab_size: int
) -> Summary:
    """Reduce scores to a `Summary`; `texts`: the number of tokens of each text, and its unit."""
    units = Units.of(scores, texts)
    sizes = np.bincount(units.index).astype(np.float64)

    def sums(values: npt.NDArray[np.generic]) -> FloatArray:
        return sums_by_unit(values, units.index, units.count)

    def quantile(fraction: float) -> Estimate:
        return quantile_interval(scores.kl, units.index, units.strata, fraction)

    ratio = mean_interval(sums(scores.candidate_nll - scores.baseline_nll), sizes, units.strata).mapped(_exp)
    kl = mean_interval(sums(scores.kl), sizes, units.strata).clipped(0, math.inf)
    same_top1 = proportion_interval(sums(scores.agree), sizes, units.strata)
    return Summary(
        name=name,
        unit=" or ".join(sorted({unit for _, unit in texts})),
        units=units.count,
        tokens=len(scores),
        nbytes=nbytes,
        baseline_perplexity=perplexity(scores.baseline_nll),
        candidate_perplexity=perplexity(scores.candidate_nll),
        perplexity_ratio=ratio,
        baseline_bits_per_byte=bits_per_byte(scores.baseline_nll, nbytes),
        candidate_bits_per_byte=bits_per_byte(scores.candidate_nll, nbytes),
        kl_mean=kl,
        kl_median=quantile(0.5),
        kl_p99=quantile(0.99),
        kl_p999=quantile(0.999),
        kl_max=float(scores.kl.max()),
        same_top1=same_top1,
        topk_overlap=proportion_interval(sums(scores.overlap / min(TOP_K, vocab_size)), sizes, units.strata),
        margins=_margins(scores),
        kl_curve=tuple(
            (fraction, float(value))
            for fraction, value in zip(CURVE_FRACTIONS, np.quantile(scores.kl, CURVE_FRACTIONS), strict=True)
        ),
        positions=by_position(scores, units),
        effective_units=min((e.effective_units for e in (ratio, kl, same_top1) if e.effective_units), default=None),
    )


def _margins(scores: TokenScores) -> tuple[MarginBin, ...]:
    bins = []
    numbers = np.digitize(scores.margin, MARGIN_EDGES) - 1
    for number, (low, high) in enumerate(zip(MARGIN_EDGES, (*MARGIN_EDGES[1:], math.inf), strict=True)):
        in_bin = numbers == number
        tokens = int(in_bin.sum())
        same_top1 = float(scores.agree[in_bin].mean()) if tokens else math.nan
        kl = float(scores.kl[in_bin].mean()) if tokens else math.nan
        bins.append(MarginBin(low, high, tokens, same_top1, kl))
    return tuple(bins)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
