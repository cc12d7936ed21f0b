"""Summaries of scores with known values."""

import math

import numpy as np
import pytest
import torch

from minifloat.evaluate.compare.metrics import TokenScores, score_tokens
from minifloat.evaluate.compare.summary import CURVE_FRACTIONS, MARGIN_EDGES, Summary, perplexity, summarize
from minifloat.kernels.divergence import Distribution


def scores_of(p: torch.Tensor, q: torch.Tensor, units: int = 10) -> TokenScores:
    count = len(p)
    return score_tokens(
        Distribution(p),
        Distribution(q),
        torch.arange(count) % p.shape[1],
        torch.arange(count) * units // count,
        torch.arange(count),
    )


def summary_of(p: torch.Tensor, q: torch.Tensor, units: int = 10, nbytes: float = 1.0) -> Summary:
    return summarize("text", scores_of(p, q, units), nbytes, [(len(p), "document")], p.shape[1])


def noisy(seed: int, tokens: int = 200, scale: float = 1.0) -> torch.Tensor:
    base = torch.randn(tokens, 40, generator=torch.Generator().manual_seed(0)) * 3
    return base + scale * torch.randn(tokens, 40, generator=torch.Generator().manual_seed(seed))


def test_uniform_predictions_have_a_known_summary() -> None:
    uniform = torch.zeros(80, 16)
    summary = summary_of(uniform, uniform, nbytes=160)
    assert (summary.tokens, summary.units, summary.unit) == (80, 10, "document")
    assert summary.baseline_perplexity == pytest.approx(16)
    assert summary.baseline_bits_per_byte == pytest.approx(4 * 80 / 160)
    assert (summary.kl_mean.value, summary.kl_mean.high, summary.kl_max) == (0, 0, 0)
    assert (summary.perplexity_ratio.low, summary.perplexity_ratio.high) == (1, 1)
    assert (summary.same_top1.high, summary.topk_overlap.high) == (1, 1)
    assert 0.85 < summary.same_top1.low < 1 - 3 / 80  # 80 tokens that agree do not prove that all do
    assert summary.topk_overlap.low == summary.same_top1.low


def test_the_interval_of_the_ratio_is_paired() -> None:
    """The two perplexities depend on the text far more than their ratio does."""
    text = torch.randn(200, 1, generator=torch.Generator().manual_seed(1)).abs() * 5  # how hard each token is
    targets = torch.arange(200) % 40
    hard = noisy(1, scale=0)
    hard[torch.arange(200), targets] -= text[:, 0]
    summary = summary_of(hard, hard + 0.01 * noisy(2, scale=1))
    assert summary.perplexity_ratio.low < summary.perplexity_ratio.value < summary.perplexity_ratio.high
    assert summary.perplexity_ratio.high - summary.perplexity_ratio.low < 0.02
    assert summary.perplexity_ratio.value == pytest.approx(
        summary.candidate_perplexity / summary.baseline_perplexity, rel=1e-12
    )


def test_same_top1_is_the_fraction_of_equal_first_choices() -> None:
    p, q = torch.eye(4), torch.eye(4)
    q[3] = torch.tensor([1.0, 0, 0, 0])
    summary = summary_of(p, q, units=1)
    assert summary.same_top1.value == 0.75
    assert not summary.same_top1.known


def test_quantiles_are_taken_over_tokens() -> None:
    scores = scores_of(noisy(1), noisy(2))
    summary = summarize("text", scores, 1, [(200, "document")], 40)
    assert summary.kl_median.value == pytest.approx(float(np.median(scores.kl)))
    assert summary.kl_p99.value == pytest.approx(float(np.quantile(scores.kl, 0.99)))
    assert summary.kl_median.value < summary.kl_p99.value <= summary.kl_p999.value <= summary.kl_max == scores.kl.max()
    assert [fraction for fraction, _ in summary.kl_curve] == list(CURVE_FRACTIONS)
    assert [kl for _, kl in summary.kl_curve] == sorted(kl for _, kl in summary.kl_curve)


def test_texts_are_strata_of_all_texts() -> None:
    """The difference between two texts is no error: the texts are given."""
    easy, hard = noisy(1, scale=0.1), noisy(2, scale=3)
    scores = scores_of(torch.cat([noisy(0, scale=0)] * 2), torch.cat([easy, hard]), units=20)
    together = summarize("all", scores, 1, [(200, "document"), (200, "document")], 40)
    assert (together.units, together.unit) == (20, "document")
    pooled = summarize("all", scores, 1, [(400, "document")], 40)
    assert together.kl_mean.value == pooled.kl_mean.value
    assert together.kl_mean.high - together.kl_mean.low < (pooled.kl_mean.high - pooled.kl_mean.low) / 2
    assert pooled.effective_units is not None
    assert together.effective_units is not None
    assert pooled.effective_units < 8 < together.effective_units <= 20


def test_every_token_is_in_one_bin_and_sure_choices_flip_less() -> None:
    summary = summary_of(noisy(1, tokens=4000, scale=0.0), noisy(2, tokens=4000, scale=0.5))
    assert sum(margin.tokens for margin in summary.margins) == 4000
    assert [margin.low for margin in summary.margins] == list(MARGIN_EDGES)
    assert summary.margins[-1].high == math.inf
    assert summary.margins[0].same_top1 < 0.7 < 0.99 < summary.margins[-2].same_top1
    weighted = sum(margin.tokens * margin.same_top1 for margin in summary.margins if margin.tokens) / 4000
    assert weighted == pytest.approx(summary.same_top1.value)


def test_units_may_have_any_numbers() -> None:
    scores = scores_of(noisy(1), noisy(2))
    shifted = TokenScores(**{**vars(scores), "unit": scores.unit * 7 + 1000})
    texts = [(200, "document")]
    assert summarize("t", scores, 1, texts, 40) == summarize("t", shifted, 1, texts, 40)


def test_a_perplexity_too_large_for_a_float_is_infinite() -> None:
    assert perplexity(np.array([1e5])) == math.inf
