"""The scores of a text's tokens in a few numbers, each with its interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minifloat.compare.intervals import Estimate, FloatArray, mean_interval, quantile_interval, sums_by_unit
from minifloat.compare.metrics import TOP_K, TokenScores

#: Nats between the baseline's first and second choice where bins of `MarginBin` begin.
MARGIN_EDGES = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
#: Steps of `Summary.kl_curve`.
CURVE_FRACTIONS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 0.9995, 0.9999)


@dataclass(frozen=True)
class MarginBin:
    """Tokens at which the baseline preferred its first choice by about as much.

    A choice that flips where the baseline hardly had one is no loss; one that flips where it was sure is.

    Attributes:
        low: Nats between first and second choice; from here,
        high: to below here; Inf in the last bin.
        tokens: How many tokens.
        agreement: Fraction of them at which the candidate's first choice is the same; NaN of none.
        kl_mean: Their mean KL divergence in nats; NaN of none.
    """

    low: float
    high: float
    tokens: int
    agreement: float
    kl_mean: float


@dataclass(frozen=True)
class Summary:
    """The scores of a text, or of all texts, in a few numbers.

    Attributes:
        name: The text.
        unit: What was drawn for the intervals: ``"document"`` or ``"window"``.
        units: How many of them.
        tokens: Scored tokens.
        nbytes: UTF-8 bytes that the scored tokens stand for.
        baseline_perplexity: exp of the mean negative log-likelihood per token.
        candidate_perplexity: The same of the candidate.
        perplexity_ratio: The second over the first, with a paired interval.
        baseline_bits_per_byte: Negative log-likelihood in bits, per byte of text; comparable between vocabularies.
        candidate_bits_per_byte: The same of the candidate.
        kl_mean: Mean KL divergence in nats per token.
        kl_median: Its median; likewise its 99th and 99.9th percentile.
        kl_p99: See `kl_median`.
        kl_p999: See `kl_median`.
        kl_max: Its largest value.
        top1_agreement: Fraction of the tokens at which both models' first choice is the same.
        agreement: The same, ties apart: tokens count as agreed at which the baseline's two first choices are within
            `minifloat.compare.metrics.TIE` nats.
        topk_overlap: Fraction of the baseline's ten most probable tokens that are among the candidate's ten.
        margins: Agreement by how sure the baseline was.
        kl_curve: Pairs of a fraction of the tokens and the KL divergence that so many stay below.
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
    top1_agreement: Estimate
    agreement: Estimate
    topk_overlap: Estimate
    margins: tuple[MarginBin, ...]
    kl_curve: tuple[tuple[float, float], ...]


def perplexity(nll: FloatArray) -> float:
    """The exponential of the mean of negative log-likelihoods in nats; Inf where that is too large for a float."""
    return _exp(float(nll.mean()))


def bits_per_byte(nll: FloatArray, nbytes: float) -> float:
    """Negative log-likelihoods in nats as bits per byte of the text."""
    return float(nll.sum()) / math.log(2) / nbytes


def summarize(name: str, scores: TokenScores, nbytes: float, unit: str, vocab_size: int) -> Summary:
    """Reduce scores to a `Summary`.

    Args:
        name: The text.
        scores: At least one token.
        nbytes: UTF-8 bytes of the scored tokens.
        unit: What `TokenScores.unit` counts.
        vocab_size: Tokens of the vocabulary.
    """
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
        top1_agreement=mean(scores.agree).clipped(0, 1),
        agreement=mean(scores.same_choice).clipped(0, 1),
        topk_overlap=mean(scores.overlap / min(TOP_K, vocab_size)).clipped(0, 1),
        margins=_margins(scores),
        kl_curve=tuple(
            (fraction, float(value))
            for fraction, value in zip(CURVE_FRACTIONS, np.quantile(scores.kl, CURVE_FRACTIONS), strict=True)
        ),
    )


def _margins(scores: TokenScores) -> tuple[MarginBin, ...]:
    bins = []
    numbers = np.digitize(scores.margin, MARGIN_EDGES) - 1
    for number, (low, high) in enumerate(zip(MARGIN_EDGES, (*MARGIN_EDGES[1:], math.inf), strict=True)):
        chosen = numbers == number
        tokens = int(chosen.sum())
        agreement = float(scores.agree[chosen].mean()) if tokens else math.nan
        kl = float(scores.kl[chosen].mean()) if tokens else math.nan
        bins.append(MarginBin(low, high, tokens, agreement, kl))
    return tuple(bins)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
