"""The divergence on held-out text against the formula in float64, and its standard error."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from minifloat.errors import NonFiniteError
from minifloat.quantize.rounding.damage import measure_divergence


def make_logits(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    original = 3 * torch.randn(tokens, 50, generator=generator)
    nearest, method = (original + size * torch.randn(tokens, 50, generator=generator) for size in (0.5, 0.1))
    return original, nearest, method


def divergence_of(original: Tensor, other: Tensor) -> float:
    """KL(original || other) in nats, the mean over tokens, in float64."""
    p, q = original.double().softmax(-1), other.double().softmax(-1)
    return float((p * (p / q).log()).sum(-1).mean())


def test_means_count_tokens_and_errors_come_from_the_sequences() -> None:
    sequences = [make_logits(tokens, seed) for seed, tokens in enumerate((10, 40, 25))]
    found = measure_divergence(sequences)
    assert found.tokens == 75
    for place, value, error in ((1, found.nearest, found.nearest_error), (2, found.method, found.method_error)):
        each = torch.tensor([divergence_of(logits[0], logits[place]) for logits in sequences], dtype=torch.float64)
        mean = float((each * torch.tensor([10, 40, 25])).sum() / 75)
        assert value == pytest.approx(mean, rel=1e-4)
        assert error == pytest.approx(float((each - mean).square().sum() / 2 / 3) ** 0.5, rel=1e-3)
    assert found.nearest > 10 * found.method


def test_equal_logits_have_no_divergence() -> None:
    original, _, _ = make_logits(10, 0)
    found = measure_divergence([(original, original, original)] * 2)
    assert (found.nearest, found.method, found.nearest_error) == (0.0, 0.0, 0.0)


def test_one_sequence_has_no_standard_error() -> None:
    found = measure_divergence([make_logits(10, 0)])
    assert found.nearest > 0
    assert (found.nearest_error, found.method_error) == (None, None)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_logits_with_nan_are_refused_with_the_sequence(place: int) -> None:
    broken = make_logits(10, 1)
    broken[place][4, 7] = math.nan
    with pytest.raises(NonFiniteError, match=r"logits: .* on held-out sequence 1"):
        measure_divergence([make_logits(10, 0), broken])
