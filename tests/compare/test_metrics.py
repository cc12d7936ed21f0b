"""The metrics against torch's own and against distributions whose numbers are known."""

import math

import numpy as np
import pytest
import torch

from minifloat.compare import metrics
from minifloat.compare.metrics import concatenate, kl_divergence, score_tokens, summarize


def logits(tokens: int = 13, vocabulary: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4


TARGETS = torch.arange(13) % 50


def test_kl_is_that_of_torch_in_float64() -> None:
    p, q = logits(seed=1).double(), logits(seed=2).double()
    expected = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True)
    scores = score_tokens(p, q, TARGETS)
    np.testing.assert_allclose(scores.kl, expected.sum(-1).numpy(), rtol=1e-12)


def test_likelihoods_are_those_of_cross_entropy() -> None:
    p, q = logits(seed=1), logits(seed=2)
    scores = score_tokens(p, q, TARGETS)
    for found, given in ((scores.baseline_nll, p), (scores.candidate_nll, q)):
        expected = torch.nn.functional.cross_entropy(given.double(), TARGETS, reduction="none")
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12)


def test_equal_logits_have_a_divergence_of_exactly_zero() -> None:
    scores = score_tokens(logits().bfloat16(), logits().bfloat16(), TARGETS)
    assert np.array_equal(scores.kl, np.zeros(13))
    assert scores.agree.all()


def test_a_tiny_difference_is_not_lost_to_rounding() -> None:
    p = logits().double()
    shift = torch.zeros(50, dtype=torch.float64)
    shift[3] = 1e-5
    mass = p.softmax(-1)[:, 3]
    expected = mass * (1 - mass) * 1e-10 / 2  # second order in the shift
    np.testing.assert_allclose(score_tokens(p, p + shift, TARGETS).kl, expected.numpy(), rtol=1e-2, atol=1e-15)


def test_what_the_reference_excludes_adds_nothing() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]]).log()
    q = torch.tensor([[0.25, 0.25, 0.5]]).log()
    torch.testing.assert_close(kl_divergence(p, q), torch.tensor([math.log(2)]))
    torch.testing.assert_close(kl_divergence(p, p), torch.tensor([0.0]))


def test_what_only_the_candidate_excludes_is_infinite() -> None:
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]).log()
    assert kl_divergence(p, q).item() == math.inf


def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = score_tokens(logits(seed=1), logits(seed=2), TARGETS)
    monkeypatch.setattr(metrics, "SLAB_ELEMENTS", 4 * 50)
    slabs = score_tokens(logits(seed=1), logits(seed=2), TARGETS)
    for name in ("baseline_nll", "candidate_nll", "kl", "agree"):
        assert np.array_equal(getattr(whole, name), getattr(slabs, name))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_nan_or_inf_give_nan_in_their_row_only(bad: float) -> None:
    broken = logits(seed=2)
    broken[4, 7] = bad
    nll = score_tokens(logits(seed=1), broken, TARGETS).candidate_nll
    assert np.flatnonzero(np.isnan(nll)).tolist() == [4]


def test_a_summary_of_uniform_predictions_is_known() -> None:
    uniform = torch.zeros(8, 16)
    summary = summarize("text", score_tokens(uniform, uniform, torch.arange(8)), nbytes=16)
    assert summary.tokens == 8
    assert summary.baseline_perplexity == pytest.approx(16)
    assert summary.baseline_bits_per_byte == pytest.approx(4 * 8 / 16)
    assert (summary.kl_mean, summary.kl_max, summary.top1_agreement) == (0, 0, 1)


def test_agreement_counts_first_choices() -> None:
    p, q = torch.eye(4), torch.eye(4)
    q[3] = torch.tensor([1.0, 0, 0, 0])
    summary = summarize("text", score_tokens(p, q, torch.zeros(4, dtype=torch.int64)), nbytes=1)
    assert summary.top1_agreement == 0.75


def test_quantiles_are_of_the_tokens() -> None:
    scores = score_tokens(logits(seed=1), logits(seed=2), TARGETS)
    summary = summarize("text", concatenate([scores, scores]), nbytes=1)
    assert summary.kl_median == pytest.approx(float(np.median(scores.kl)))
    assert summary.kl_median < summary.kl_p99 <= summary.kl_max == scores.kl.max()


def test_a_perplexity_too_large_for_a_float_is_infinite() -> None:
    assert metrics.perplexity(np.array([1e5])) == math.inf
