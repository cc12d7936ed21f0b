"""Scores of tokens from the logits of two models, as distributions in float64, a slab of positions at a time.

In float64 a model compared with itself gives exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Number of most probable tokens whose overlap between two models is counted.
TOP_K = 10

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TokenScores:
    """The scores of tokens; all arrays are ``[T]``."""

    unit: npt.NDArray[np.int64]
    baseline_nll: FloatArray
    candidate_nll: FloatArray
    kl: FloatArray
    agree: npt.NDArray[np.bool_]
    overlap: npt.NDArray[np.uint8]
    margin: npt.NDArray[np.float32]
    position: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.kl)


class Distribution:
    """The distributions of one model's logits ``[R, V]``."""

    def __init__(self, logits: Tensor) -> None:
        wide = logits.double()
        self.top_logits, self.top = wide.topk(min(TOP_K, wide.shape[-1]), dim=-1)
        largest = self.top_logits[:, :1].clone()
        self.logits = wide.sub_(largest) if wide is not logits else wide - largest
        self.top_logits = self.top_logits - largest
        self.weights = self.logits.exp()
        self.total = self.weights.sum(-1)
        self.log_total = self.total.log()

    def nll(self, targets: Tensor) -> Tensor:
        """Return -log of the probabilities of tokens ``[R]``, in nats."""
        return self.log_total - self.logits.gather(-1, targets[:, None].to(self.logits.device))[:, 0]

    def margin(self) -> Tensor:
        """Return the nats ``[R]`` between the first and the second choice; Inf where there is no second."""
        if self.top.shape[-1] < 2:
            return torch.full_like(self.total, torch.inf)
        return self.top_logits[:, 0] - self.top_logits[:, 1]

    def top_log_probabilities(self) -> Tensor:
        """Return the log-probabilities ``[R, k]`` of the tokens in `top`, in nats."""
        return self.top_logits - self.log_total[:, None]


def kl_divergence(p: Distribution, q: Distribution) -> Tensor:
    """Return ``sum p (log p - log q)`` over the vocabulary, ``[R]``, in nats."""
    total = (p.logits - q.logits).mul_(p.weights).sum(-1)
    if bool(total.isnan().any()):  # 0 times infinity, or NaN in a model's logits
        terms = torch.where(p.weights == 0, torch.zeros_like(p.weights), p.weights * (p.logits - q.logits))
        total = terms.sum(-1)
    return (total / p.total - p.log_total + q.log_total).clamp_min(0)  # rounding can make it negative


def score_tokens(p: Distribution, q: Distribution, targets: Tensor, units: Tensor, positions: Tensor) -> TokenScores:
    shared = (p.top[:, :, None] == q.top[:, None, :]).any(-1).sum(-1)
    return TokenScores(
        unit=units.numpy(),
        baseline_nll=p.nll(targets).cpu().numpy(),
        candidate_nll=q.nll(targets).cpu().numpy(),
        kl=kl_divergence(p, q).cpu().numpy(),
        agree=(p.top[:, 0] == q.top[:, 0]).cpu().numpy(),
        overlap=shared.to(torch.uint8).cpu().numpy(),
        margin=p.margin().float().cpu().numpy(),
        position=positions.to(torch.int32).numpy(),
    )


def concatenate(parts: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(TokenScores)}
    )
