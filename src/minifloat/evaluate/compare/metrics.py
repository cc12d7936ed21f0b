"""Scores of tokens from the logits of two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minifloat.kernels.divergence import Choices, Distribution, divergence, kl_divergence

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


def score_tokens(p: Distribution, q: Distribution, targets: Tensor, units: Tensor, positions: Tensor) -> TokenScores:
    return _scores((kl_divergence(p, q), p, q), (p.nll(targets), q.nll(targets)), units, positions)


def score_logits(
    p: Tensor, q: Tensor, targets: Tensor, units: Tensor, positions: Tensor
) -> tuple[TokenScores, Choices, Choices]:
    """Return the scores of tokens from the logits ``[R, V]`` of both models, and the first choices of both."""
    found = kl, of_p, of_q = divergence(p, q)
    of_targets = (logits.gather(-1, targets[:, None].to(logits.device))[:, 0].to(kl.device) for logits in (p, q))
    nll = (of_p.nll_of(next(of_targets)), of_q.nll_of(next(of_targets)))
    return _scores(found, nll, units, positions), of_p, of_q


def _scores(
    found: tuple[Tensor, Choices, Choices], nll: tuple[Tensor, Tensor], units: Tensor, positions: Tensor
) -> TokenScores:
    kl, p, q = found
    shared = (p.top[:, :, None] == q.top[:, None, :]).any(-1).sum(-1)
    return TokenScores(
        unit=units.numpy(),
        baseline_nll=nll[0].cpu().numpy(),
        candidate_nll=nll[1].cpu().numpy(),
        kl=kl.cpu().numpy(),
        agree=(p.top[:, 0] == q.top[:, 0]).cpu().numpy(),
        overlap=shared.to(torch.uint8).cpu().numpy(),
        margin=p.margin().float().cpu().numpy(),
        position=positions.to(torch.int32).numpy(),
    )


def concatenate(parts: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(TokenScores)}
    )
