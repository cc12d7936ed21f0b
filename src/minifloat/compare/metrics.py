"""What two models' predictions for the same tokens say about each other: pure functions, no model and no file.

Logits are compared as distributions. Their logarithms are taken in float64, a slab of positions at a time, so that a
model against itself gives exactly 0 and a vocabulary of any size fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Logits that are held in float64 at a time.
SLAB_ELEMENTS = 2**22

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TokenScores:
    """What is kept of each scored token; all arrays are ``[T]``.

    Attributes:
        baseline_nll: -log of the probability that the baseline gives the token, in nats.
        candidate_nll: The same of the candidate.
        kl: KL divergence of the candidate's distribution from the baseline's, in nats.
        agree: Whether both find the same token the most probable.
    """

    baseline_nll: FloatArray
    candidate_nll: FloatArray
    kl: FloatArray
    agree: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.kl)


@dataclass(frozen=True)
class Summary:
    """The scores of a text, or of all texts, in a few numbers.

    Attributes:
        name: The text.
        tokens: Scored tokens.
        nbytes: UTF-8 bytes that the scored tokens stand for.
        baseline_perplexity: exp of the mean negative log-likelihood per token.
        candidate_perplexity: The same of the candidate.
        baseline_bits_per_byte: Negative log-likelihood in bits, per byte of text; comparable between vocabularies.
        candidate_bits_per_byte: The same of the candidate.
        kl_mean: Mean KL divergence in nats per token; likewise its median, 99th percentile and largest value.
        kl_median: See `kl_mean`.
        kl_p99: See `kl_mean`.
        kl_max: See `kl_mean`.
        top1_agreement: Fraction of the tokens at which both models' first choice is the same.
    """

    name: str
    tokens: int
    nbytes: float
    baseline_perplexity: float
    candidate_perplexity: float
    baseline_bits_per_byte: float
    candidate_bits_per_byte: float
    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    top1_agreement: float


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``sum p (log p - log q)`` over the last dimension, in nats.

    Where p is 0 the term is 0, whatever q; where q alone is 0 the result is Inf.

    Args:
        log_p: ``[..., V]`` normalized log-probabilities of the reference.
        log_q: ``[..., V]`` those of the approximation.
    """
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p))
    return terms.sum(-1)


def score_tokens(baseline: Tensor, candidate: Tensor, targets: Tensor) -> TokenScores:
    """Score predictions of both models.

    Args:
        baseline: ``[T, V]`` logits, any floating dtype; widened exactly.
        candidate: ``[T, V]`` logits.
        targets: ``[T]`` the tokens that came.

    Returns:
        The scores; NaN where a model's logits hold NaN or +Inf.
    """
    rows = max(SLAB_ELEMENTS // max(baseline.shape[-1], 1), 1)
    slabs = zip(*(torch.split(tensor, rows) for tensor in (baseline, candidate, targets)), strict=True)
    return concatenate([_score_slab(p, q, target) for p, q, target in slabs])


def _score_slab(baseline: Tensor, candidate: Tensor, targets: Tensor) -> TokenScores:
    log_p = baseline.double().log_softmax(-1)
    log_q = candidate.to(baseline.device).double().log_softmax(-1)
    picked = targets.to(baseline.device)[:, None]
    return TokenScores(
        baseline_nll=-log_p.gather(-1, picked)[:, 0].cpu().numpy(),
        candidate_nll=-log_q.gather(-1, picked)[:, 0].cpu().numpy(),
        kl=kl_divergence(log_p, log_q).cpu().numpy(),
        agree=(log_p.argmax(-1) == log_q.argmax(-1)).cpu().numpy(),
    )


def concatenate(parts: Sequence[TokenScores]) -> TokenScores:
    """The scores of several stretches of text as one; there is at least one."""
    return TokenScores(
        np.concatenate([part.baseline_nll for part in parts]),
        np.concatenate([part.candidate_nll for part in parts]),
        np.concatenate([part.kl for part in parts]),
        np.concatenate([part.agree for part in parts]),
    )


def perplexity(nll: FloatArray) -> float:
    """The exponential of the mean of negative log-likelihoods in nats; Inf where that is too large for a float."""
    with np.errstate(over="ignore"):
        return float(np.exp(nll.mean()))


def bits_per_byte(nll: FloatArray, nbytes: float) -> float:
    """Negative log-likelihoods in nats as bits per byte of the text."""
    return float(nll.sum()) / math.log(2) / nbytes


def summarize(name: str, scores: TokenScores, nbytes: float) -> Summary:
    """Reduce scores to a `Summary`.

    Args:
        name: The text.
        scores: At least one token.
        nbytes: UTF-8 bytes of the scored tokens.
    """
    return Summary(
        name=name,
        tokens=len(scores),
        nbytes=nbytes,
        baseline_perplexity=perplexity(scores.baseline_nll),
        candidate_perplexity=perplexity(scores.candidate_nll),
        baseline_bits_per_byte=bits_per_byte(scores.baseline_nll, nbytes),
        candidate_bits_per_byte=bits_per_byte(scores.candidate_nll, nbytes),
        kl_mean=float(scores.kl.mean()),
        kl_median=float(np.quantile(scores.kl, 0.5)),
        kl_p99=float(np.quantile(scores.kl, 0.99)),
        kl_max=float(scores.kl.max()),
        top1_agreement=float(scores.agree.mean()),
    )
