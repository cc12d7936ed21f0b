"""The metrics against torch's functions and on distributions with known values."""

import math

import numpy as np
import pytest
import torch

from minifloat.evaluate.compare.metrics import TokenScores, concatenate, score_logits, score_tokens
from minifloat.kernels.divergence import TOP_K, Distribution, kl_divergence

TARGETS = torch.arange(13) % 50
UNITS = torch.arange(13) // 4


def logits(tokens: int = 13, vocabulary: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4


def score(p: torch.Tensor, q: torch.Tensor) -> TokenScores:
    return score_tokens(Distribution(p), Distribution(q), TARGETS[: len(p)], UNITS[: len(p)], UNITS[: len(p)])


def test_kl_equals_torchs_kl_in_float64() -> None:
    p, q = logits(seed=1).double(), logits(seed=2).double()
    expected = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True)
    np.testing.assert_allclose(score(p, q).kl, expected.sum(-1).numpy(), rtol=1e-12)


def test_likelihoods_equal_those_of_cross_entropy() -> None:
    p, q = logits(seed=1), logits(seed=2)
    scores = score(p, q)
    for found, given in ((scores.baseline_nll, p), (scores.candidate_nll, q)):
        expected = torch.nn.functional.cross_entropy(given.double(), TARGETS, reduction="none")
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12)


def test_equal_logits_have_a_divergence_of_exactly_zero() -> None:
    scores = score(logits().bfloat16(), logits().bfloat16())
    assert np.array_equal(scores.kl, np.zeros(13))
    assert scores.agree.all()
    assert (scores.overlap == TOP_K).all()


def test_a_tiny_difference_is_not_lost_to_rounding() -> None:
    p = logits().double()
    shift = torch.zeros(50, dtype=torch.float64)
    shift[3] = 1e-5
    mass = p.softmax(-1)[:, 3]
    expected = mass * (1 - mass) * 1e-10 / 2  # second order in the shift
    np.testing.assert_allclose(score(p, p + shift).kl, expected.numpy(), rtol=1e-2, atol=1e-15)


def test_a_shift_of_all_logits_makes_no_difference() -> None:
    p = logits().double()
    np.testing.assert_allclose(score(p, p + 1000).kl, 0, atol=1e-13)


def test_tokens_that_the_baseline_excludes_add_nothing_to_kl() -> None:
    p = Distribution(torch.tensor([[0.5, 0.5, 0.0]]).log())
    q = Distribution(torch.tensor([[0.25, 0.25, 0.5]]).log())
    torch.testing.assert_close(kl_divergence(p, q), torch.tensor([math.log(2)], dtype=torch.float64))
    assert kl_divergence(p, p).item() == 0


def test_a_token_that_only_the_candidate_excludes_makes_kl_infinite() -> None:
    p, q = Distribution(torch.tensor([[0.5, 0.5]]).log()), Distribution(torch.tensor([[1.0, 0.0]]).log())
    assert kl_divergence(p, q).item() == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_logits_that_are_nan_or_inf_give_nan_in_their_row_only(bad: float, side: str) -> None:
    broken = logits(seed=2)
    broken[4, 7] = bad
    sound = logits(seed=1)
    scores = score(broken, sound) if side == "baseline" else score(sound, broken)
    assert np.flatnonzero(np.isnan(getattr(scores, f"{side}_nll"))).tolist() == [4]
    assert np.flatnonzero(np.isnan(scores.kl)).tolist() == [4]


def test_the_margin_is_between_the_first_and_the_second_choice() -> None:
    p = torch.tensor([[0.6, 0.1, 0.3], [0.2, 0.4, 0.4]]).log()
    np.testing.assert_allclose(score(p, p).margin, [math.log(2), 0], atol=1e-6)
    assert Distribution(torch.zeros(2, 1)).margin().tolist() == [math.inf, math.inf]


def test_the_overlap_counts_tokens_among_the_first_ten_of_both_models() -> None:
    p = -torch.arange(30.0).repeat(2, 1)
    q = p.clone()
    q[1, :4] = -100.0  # four of the first ten are now last
    assert score(p, q).overlap.tolist() == [10, 6]
    order = torch.arange(9, -1, -1)
    q[0, :10] = p[0, order]  # the same ten, the other way round
    scores = score(p, q)
    assert scores.overlap[0] == 10
    assert not scores.agree[0]


def test_probabilities_of_the_first_choices_equal_those_of_softmax() -> None:
    found = Distribution(logits()).top_log_probabilities().exp()
    torch.testing.assert_close(found, logits().double().softmax(-1).topk(TOP_K).values)


def test_scores_of_stretches_are_concatenated_field_by_field() -> None:
    whole = score(logits(seed=1), logits(seed=2))
    parts = [
        score_tokens(Distribution(p), Distribution(q), target, unit, unit)
        for p, q, target, unit in zip(
            logits(seed=1).split(5), logits(seed=2).split(5), TARGETS.split(5), UNITS.split(5), strict=True
        )
    ]
    together = concatenate(parts)
    assert len(together) == 13
    for name in ("unit", "baseline_nll", "candidate_nll", "kl", "agree", "overlap", "margin"):
        assert np.array_equal(getattr(whole, name), getattr(together, name))


def test_scores_from_logits_are_those_of_distributions() -> None:
    p, q = logits(seed=1), logits(seed=2)
    found, of_p, of_q = score_logits(p, q, TARGETS, UNITS, UNITS)
    for field, expected in vars(score(p, q)).items():
        np.testing.assert_allclose(getattr(found, field), expected, rtol=1e-12, err_msg=field)
    assert torch.equal(of_p.top, Distribution(p).top)
    torch.testing.assert_close(of_q.top_log_probabilities(), Distribution(q).top_log_probabilities())
