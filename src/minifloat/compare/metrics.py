"""What models' predictions for the same tokens say about each other: pure functions, no model and no file.

Logits are compared as distributions, in float64, a slab of positions at a time, so that a model against itself gives
exactly 0 and a vocabulary of any size fits. Of each token a few numbers are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Most probable tokens that two models are asked to have in common.
TOP_K = 10

#: Nats between the baseline's two first choices below which it has no first choice: one is 1.1 times as probable.
TIE = 0.1

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TokenScores:
    """What is kept of each scored token; all arrays are ``[T]``.

    Attributes:
        unit: The document or window that the token is of.
        baseline_nll: -log of the probability that the baseline gives the token, in nats.
        candidate_nll: The same of the candidate.
        kl: KL divergence of the candidate's distribution from the baseline's, in nats.
        agree: Whether both find the same token the most probable.
        overlap: How many of the baseline's `TOP_K` most probable tokens are among the candidate's.
        margin: By how many nats the baseline's first choice is more probable than its second.
    """

    unit: npt.NDArray[np.int64]
    baseline_nll: FloatArray
    candidate_nll: FloatArray
    kl: FloatArray
    agree: npt.NDArray[np.bool_]
    overlap: npt.NDArray[np.uint8]
    margin: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.kl)

    @property
    def same_choice(self) -> npt.NDArray[np.bool_]:
        """Whether both find the same token the most probable, or the baseline finds two nearly equally so (`TIE`)."""
        return self.agree | (self.margin < TIE)


class Distribution:
    """What is needed of one model's logits ``[R, V]`` to compare them with another's.

    Attributes:
        logits: float64, less their largest; ``[R, V]``.
        weights: ``exp(logits)``, whose sum is not 1.
        total: ``[R]`` the sums of `weights`.
        log_total: ``[R]`` their logarithms.
        top: ``[R, k]`` the most probable tokens, the first first.
        top_logits: ``[R, k]`` their `logits`.
    """

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
        """-log of the probabilities of tokens ``[R]``, in nats."""
        return self.log_total - self.logits.gather(-1, targets[:, None].to(self.logits.device))[:, 0]

    def margin(self) -> Tensor:
        """``[R]`` nats between the first and the second choice; Inf where there is no second."""
        if self.top.shape[-1] < 2:
            return torch.full_like(self.total, torch.inf)
        return self.top_logits[:, 0] - self.top_logits[:, 1]

    def top_log_probabilities(self) -> Tensor:
        """``[R, k]`` of `top`, in nats."""
        return self.top_logits - self.log_total[:, None]


def same_choice(p: Distribution, q: Distribution) -> Tensor:
    """`TokenScores.same_choice` of a slab, ``[R]``."""
    return (p.top[:, 0] == q.top[:, 0]) | (p.margin().float() < TIE)


def kl_divergence(p: Distribution, q: Distribution) -> Tensor:
    """``sum p (log p - log q)`` over the vocabulary, in nats: ``[R]``.

    Where p is 0 the term is 0, whatever q; where q alone is 0 the result is Inf. NaN stays NaN.
    """
    total = (p.logits - q.logits).mul_(p.weights).sum(-1)
    if bool(total.isnan().any()):  # 0 times infinity, or what is not a number in a model's logits
        terms = torch.where(p.weights == 0, torch.zeros_like(p.weights), p.weights * (p.logits - q.logits))
        total = terms.sum(-1)
    return (total / p.total - p.log_total + q.log_total).clamp_min(0)  # rounding can put it below


def score_tokens(p: Distribution, q: Distribution, targets: Tensor, units: Tensor) -> TokenScores:
    """Score the predictions of a slab of positions.

    Args:
        p: The baseline's.
        q: The candidate's.
        targets: ``[R]`` the tokens that came.
        units: ``[R]`` the units that they are of.

    Returns:
        The scores; NaN where a model's logits hold NaN or +Inf.
    """
    shared = (p.top[:, :, None] == q.top[:, None, :]).any(-1).sum(-1)
    return TokenScores(
        unit=units.numpy(),
        baseline_nll=p.nll(targets).cpu().numpy(),
        candidate_nll=q.nll(targets).cpu().numpy(),
        kl=kl_divergence(p, q).cpu().numpy(),
        agree=(p.top[:, 0] == q.top[:, 0]).cpu().numpy(),
        overlap=shared.to(torch.uint8).cpu().numpy(),
        margin=p.margin().float().cpu().numpy(),
    )


def concatenate(parts: Sequence[TokenScores]) -> TokenScores:
    """The scores of several stretches of text as one; there is at least one."""
    return TokenScores(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(TokenScores)}
    )
