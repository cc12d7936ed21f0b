"""Summary of the scores of a text: means and quantiles over tokens, with their intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minifloat.evaluate.compare.intervals import Estimate, FloatArray, mean_interval, quantile_interval, sums_by_unit
from minifloat.evaluate.compare.metrics import TOP_K, TokenScores
from minifloat.evaluate.compare.positions import Positions, by_position

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


def perplexity(nll: FloatArray) -> float:
    """Return exp of the mean of negative log-likelihoods in nats; Inf where it is too large for a float."""
    return _exp(float(nll.mean()))


def bits_per_byte(nll: FloatArray, nbytes: float) -> float:
    """Convert negative log-likelihoods in nats to bits per byte of the text."""
    return float(nll.sum()) / math.log(2) / nbytes


def summarize(name: str, scores: TokenScores, nbytes: float, unit: str, vocab_size: int) -> Summary:
    """Reduce scores to a `Summary`."""
    numbers, index = np.unique(scores.unit, return_inverse=True)
    index, count = index.astype(np.int64), len(numbers)
    sizes = np.bincount(index).astype(np.float64)

    def mean(values: npt.NDArray[np.generic]) -> Estimate:
        return mean_interval(sums_by_unit(values, index, count), sizes)

    def quantile(fraction: float) -> Estimate:
        return quantile_interval(scores.kl, index, count, fraction)

    return Summary(
        name=name,
        unit=unit,
        units=count,
        tokens=len(scores),
        nbytes=nbytes,
        baseline_perplexity=perplexity(scores.baseline_nll),
        candidate_perplexity=perplexity(scores.candidate_nll),
        perplexity_ratio=mean(scores.candidate_nll - scores.baseline_nll).mapped(_exp),
        baseline_bits_per_byte=bits_per_byte(scores.baseline_nll, nbytes),
        candidate_bits_per_byte=bits_per_byte(scores.candidate_nll, nbytes),
        kl_mean=mean(scores.kl).clipped(0, math.inf),
        kl_median=quantile(0.5),
        kl_p99=quantile(0.99),
        kl_p999=quantile(0.999),
        kl_max=float(scores.kl.max()),
        same_top1=mean(scores.agree).clipped(0, 1),
        topk_overlap=mean(scores.overlap / min(TOP_K, vocab_size)).clipped(0, 1),
        margins=_margins(scores),
        kl_curve=tuple(
            (fraction, float(value))
            for fraction, value in zip(CURVE_FRACTIONS, np.quantile(scores.kl, CURVE_FRACTIONS), strict=True)
        ),
        positions=by_position(scores),
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
