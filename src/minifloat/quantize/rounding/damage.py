"""The KL divergence of a quantized model from the original, on sequences of held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from minifloat.errors import NonFiniteError
from minifloat.kernels.divergence import divergence


@dataclass(frozen=True)
class Divergence:
    """Means over the tokens of held-out text."""

    tokens: int
    nearest: float  # KL(original || rounded to nearest), in nats per token
    method: float  # KL(original || rounded by the method), in nats per token
    nearest_error: float | None  # standard error of `nearest`, from the means of the sequences; None: there is only one
    method_error: float | None
    disagreement: float  # share of tokens for which the method changes the most probable next token
    nearest_by_sequence: tuple[float, ...] = ()
    method_by_sequence: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        sequences = {
            "nearest_by_sequence": [*self.nearest_by_sequence],
            "method_by_sequence": [*self.method_by_sequence],
        }
        return asdict(self) | sequences


@dataclass
class KLMeans:
    """KL per token, as means over sequences."""

    tokens: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)

    def add(self, divergences: Tensor) -> None:
        """Add sequences of one length, ``[B, T]``."""
        self.tokens += [divergences.shape[1]] * divergences.shape[0]
        self.means += divergences.double().mean(1).tolist()

    @property
    def mean(self) -> float:
        return sum(value * count for value, count in zip(self.means, self.tokens, strict=True)) / max(self.total, 1)

    @property
    def error(self) -> float | None:
        """The standard error of `mean`, from the means of the sequences; None if there is one sequence."""
        if len(self.means) < 2:
            return None
        center = self.mean
        return math.sqrt(sum((value - center) ** 2 for value in self.means) / (len(self.means) - 1) / len(self.means))

    @property
    def total(self) -> int:
        """Number of tokens of all sequences."""
        return sum(self.tokens)


@torch.inference_mode()
def measure_divergence(logits: Iterable[Iterable[Tensor]]) -> Divergence:
    """Return the divergence over some sequences from logits ``[T, V]`` of the three models each."""
    nearest, method, changed = KLMeans(), KLMeans(), KLMeans()
    for original, *others in logits:
        for candidate, means in zip(others, (nearest, method), strict=True):
            divergences, differs = token_divergence(original, candidate)
            means.add(divergences[None])
            if not math.isfinite(means.means[-1]):
                raise NonFiniteError("logits", f"they are NaN or Inf on held-out sequence {len(means.means) - 1}")
        changed.add(differs[None])
    by_sequence = (tuple(nearest.means), tuple(method.means))
    errors = nearest.error, method.error
    return Divergence(nearest.total, nearest.mean, method.mean, *errors, changed.mean, *by_sequence)


def token_divergence(original: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(original || candidate) in nats of each token, ``[T]``, and whether their most probable tokens differ.

    Logits are ``[T, V]``.
    """
    kl, of_original, of_candidate = divergence(original, candidate)
    return kl, of_original.top[:, 0] != of_candidate.top[:, 0]
