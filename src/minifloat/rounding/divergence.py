"""How far a quantized model is from the original one, from the logits of both on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from minifloat.errors import NonFiniteError


@dataclass(frozen=True)
class Divergence:
    """Means over the tokens of held-out text.

    Attributes:
        tokens: Number of tokens.
        nearest: KL(original || rounded to nearest), in nats per token.
        method: KL(original || rounded by the method), in nats per token.
        nearest_error: Standard error of `nearest`, from the means of the sequences; None: there is only one.
        method_error: Standard error of `method`, likewise.
    """

    tokens: int
    nearest: float
    method: float
    nearest_error: float | None
    method_error: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return asdict(self)


@torch.inference_mode()
def measure_divergence(logits: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Divergence:
    """Return the divergence over some sequences.

    Args:
        logits: For each sequence the logits ``[T, V]`` of the original model, of the model rounded to nearest, and of
            the model rounded by the method.

    Raises:
        NonFiniteError: Logits hold NaN or Inf.
    """
    tokens: list[int] = []
    nearest: list[float] = []
    method: list[float] = []
    for original, *others in logits:
        base = original.log_softmax(-1)
        for candidate, means in zip(others, (nearest, method), strict=True):
            kl = torch.nn.functional.kl_div(candidate.log_softmax(-1), base, reduction="none", log_target=True)
            means.append(float(kl.sum(-1).double().mean()))
            if not math.isfinite(means[-1]):
                raise NonFiniteError("logits", f"they are NaN or Inf on held-out sequence {len(tokens)}")
        tokens.append(len(original))
    return _divergence(tokens, nearest, method)


def _divergence(tokens: list[int], nearest: list[float], method: list[float]) -> Divergence:
    total = sum(tokens)

    def mean(values: list[float]) -> float:
        return sum(value * count for value, count in zip(values, tokens, strict=True)) / max(total, 1)

    def error(values: list[float]) -> float | None:
        if len(values) < 2:
            return None
        center = mean(values)
        return math.sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1) / len(values))

    return Divergence(total, mean(nearest), mean(method), error(nearest), error(method))
