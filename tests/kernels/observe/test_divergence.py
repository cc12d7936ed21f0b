"""`divergence`: the kernel of each instruction set against torch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from minifloat.errors import ShapeError
from minifloat.kernels.divergence import TOP_K, Choices, divergence


def logits(rows: int, vocab: int, seed: int) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def compared(p: Tensor, q: Tensor) -> tuple[Tensor, Choices, Choices]:
    """The kernel's result, which is that of the reference."""
    found = divergence(p, q, impl="cpu")
    expected = divergence(p, q, impl="reference")
    torch.testing.assert_close(found[0], expected[0], rtol=1e-11, atol=1e-15, equal_nan=True)
    for of_model, wanted in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(of_model.log_total, wanted.log_total, rtol=1e-13, atol=1e-14, equal_nan=True)
    return found


@pytest.mark.parametrize("vocab", [1, 2, 9, 50, 64, 257, 1000, 49152])
def test_divergence_totals_and_choices_are_those_of_torch_in_float64(kernel: None, vocab: int) -> None:
    p, q = logits(7, vocab, 1), logits(7, vocab, 2)
    _, *choices = compared(p, q)
    for of_model, given in zip(choices, (p, q), strict=True):
        best = given.topk(min(TOP_K, vocab))
        assert torch.equal(of_model.top, best.indices)
        assert torch.equal(of_model.top_logits + of_model.largest[:, None], best.values.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equal_logits_have_a_divergence_of_exactly_zero(kernel: None, dtype: torch.dtype) -> None:
    p = logits(5, 321, 0).to(dtype)
    assert divergence(p, p.clone(), impl="cpu")[0].tolist() == [0.0] * 5


def test_small_weights_and_large_distances_are_kept(kernel: None) -> None:
    p, q = logits(9, 333, 3) * 60, logits(9, 333, 4) * 60
    p[1, 5] += 2000
    compared(p, q)
    compared(p, p + logits(9, 333, 5) * 1e-4)


def test_of_equal_logits_the_first_tokens_are_chosen(kernel: None) -> None:
    p = torch.zeros(2, 300)
    p[1, 200:] = 1
    _, of_p, _ = divergence(p, p, impl="cpu")
    assert of_p.top.tolist() == [list(range(10)), list(range(200, 210))]


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_the_first_choice_is_that_of_greedy_decoding(impl: str) -> None:
    p = (logits(200, 300, 1) / 4).round()  # most rows have several largest logits
    ties = (p == p.amax(-1, keepdim=True)).sum(-1)
    rows = p[(ties > 1) & (ties <= TOP_K)]
    assert len(rows) > 20
    _, of_p, _ = divergence(rows, rows, impl=impl)
    assert torch.equal(of_p.top[:, 0], rows.argmax(-1))


def test_excluded_tokens_have_no_weight(kernel: None) -> None:
    p, q = logits(2, 100, 1), logits(2, 100, 2)
    p[:, :95] = -math.inf
    compared(p, q)
    _, of_p, _ = divergence(p, q, impl="cpu")
    assert all(len(set(row)) == TOP_K for row in of_p.top.tolist())
    assert divergence(q, p, impl="cpu")[0].tolist() == [math.inf] * 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("token", [0, 150, 299])
def test_nan_and_inf_stay_in_their_row_and_model(kernel: None, bad: float, token: int) -> None:
    p, q = logits(3, 300, 1), logits(3, 300, 2)
    p[1, token] = bad
    kl, of_p, of_q = divergence(p, q, impl="cpu")
    assert kl.isnan().tolist() == of_p.log_total.isnan().tolist() == [False, True, False]
    assert bool(of_q.log_total.isfinite().all())


def test_logits_of_other_shapes_are_refused() -> None:
    for q in (torch.zeros(3, 4), torch.zeros(2, 5), torch.zeros(4)):
        with pytest.raises(ShapeError, match="q: expected logits"):
            divergence(torch.zeros(2, 4), q)
