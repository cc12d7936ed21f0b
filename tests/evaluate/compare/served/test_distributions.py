"""Distributions of servers: lower bounds of KL divergences, exact where everything is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from minifloat.evaluate.compare.metrics import score_tokens
from minifloat.evaluate.compare.served import KnownProbabilities, served_distribution
from minifloat.kernels.divergence import Distribution, kl_divergence

VOCAB, ROWS = 50, 40


def logits(seed: int) -> Tensor:
    return 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def named(q: Tensor, count: int, targets: Tensor) -> list[KnownProbabilities]:
    """What a server says that gives some most probable tokens and the token of the text."""
    rows = []
    for row, target in zip(q.log_softmax(-1), targets.tolist(), strict=True):
        ids = dict.fromkeys(row.topk(count).indices.tolist()) | {target: None}
        ordered = sorted(ids, key=lambda token: -float(row[token]))
        rows.append(KnownProbabilities(np.array(ordered), row[ordered].numpy()))
    return rows


@pytest.mark.parametrize("count", [1, 5, 20, VOCAB])
def test_kl_is_the_smallest_of_all_distributions_with_the_named_probabilities(count: int) -> None:
    p, q, targets = logits(0), logits(1), torch.arange(ROWS) % VOCAB
    known = named(q, count, targets)
    completed, unnamed = served_distribution(Distribution(p), known)
    bound = kl_divergence(Distribution(p), completed)
    exact = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    if count == VOCAB:
        torch.testing.assert_close(bound, exact)
        return
    assert bool((bound <= exact + 1e-9).all())
    assert bool((bound > 0).all())
    # the formula: the coarse divergence over the named tokens and the rest as one
    for row, of_row in enumerate(known):
        named_p, named_q = p[row].softmax(-1)[of_row.ids], torch.from_numpy(np.exp(of_row.logprobs))
        rest_p, rest_q = 1 - named_p.sum(), 1 - named_q.sum()
        expected = (named_p * (named_p / named_q).log()).sum() + rest_p * (rest_p / rest_q).log()
        torch.testing.assert_close(bound[row], expected, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(unnamed[row], rest_p, rtol=1e-6, atol=1e-9)


def test_first_choices_and_likelihoods_are_those_of_the_server() -> None:
    p, q, targets = logits(2), logits(3), torch.arange(ROWS) % VOCAB
    p[0, 7] += 30  # the baseline is sure of a token that the server does not name
    completed, _ = served_distribution(Distribution(p), named(q, 10, targets))
    zeros = torch.zeros(ROWS, dtype=torch.int64)
    scores = score_tokens(Distribution(p), completed, targets, zeros, zeros)
    expected = score_tokens(Distribution(p), Distribution(q), targets, zeros, zeros)
    np.testing.assert_allclose(scores.candidate_nll, expected.candidate_nll, rtol=1e-6)
    np.testing.assert_array_equal(scores.agree, expected.agree)
    np.testing.assert_array_equal(scores.overlap, expected.overlap)


def test_rounded_logarithms_that_add_up_to_more_than_1_are_finite() -> None:
    p = logits(4)[:1]
    ids = p[0].topk(5).indices.numpy()
    known = [KnownProbabilities(ids, np.log(np.array([0.7, 0.2, 0.1, 1e-5, 1e-5])))]
    completed, _ = served_distribution(Distribution(p), known)
    assert bool(kl_divergence(Distribution(p), completed).isfinite().all())
