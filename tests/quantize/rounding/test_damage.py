"""KL divergences of held-out text."""

from __future__ import annotations

import torch

from minifloat.quantize.rounding.damage import token_divergence


def test_small_divergences_are_not_lost_in_rounding() -> None:
    original, other = torch.randn(2, 12, 300, generator=torch.Generator().manual_seed(0)).mul(8)
    other[:4] = original[:4] * (1 + 2e-4)  # in float32, rounding is as large as such divergences
    kl, differs = token_divergence(original, other)
    p, q = (logits.double().log_softmax(-1) for logits in (original, other))
    torch.testing.assert_close(kl, (p.exp() * (p - q)).sum(-1), rtol=1e-6, atol=1e-12)
    assert differs.tolist() == (original.argmax(-1) != other.argmax(-1)).tolist()
