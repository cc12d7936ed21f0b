"""`served_distribution`: a whole distribution from the probabilities that a server gives.

A server gives the probabilities of few tokens: the set S. The KL divergence of its distribution q from the baseline's p
is the sum over S, which is known, and the sum over the rest R, of which only the total ``q(R) = 1 - q(S)`` is. By the
log-sum inequality (Cover and Thomas, Elements of Information Theory, theorem 2.7.1) the sum over R is at least
``p(R) log(p(R) / q(R))``, and it is that if q is proportional to p there. So R is filled in proportion to p: every KL
divergence is then a lower bound, and every probability of the text is exact, because its token is in S.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minifloat.evaluate.compare.metrics import TOP_K, Distribution
from minifloat.evaluate.compare.served.answers import KnownProbabilities

#: What is left for R at least. Servers round logarithms, so that the probabilities in S may add up to more than 1.
_LEAST_REST = 1e-6


def served_distribution(p: Distribution, known: Sequence[KnownProbabilities]) -> tuple[Distribution, Tensor]:
    """Return the distributions of a server where the tokens that it does not name share the rest as in `p`."""
    ids, logprobs, is_known = _table(known, p.logits.device)
    logits = p.logits - p.log_total[:, None]
    unnamed = (1 - (logits.gather(1, ids).exp() * is_known).sum(-1)).clamp_min(0)
    rest_of_p = unnamed.clamp_min(torch.finfo(torch.float64).eps)
    rest_of_q = (1 - (logprobs.exp() * is_known).sum(-1)).clamp_min(_LEAST_REST)
    logits += (rest_of_q.log() - rest_of_p.log())[:, None]
    logits.scatter_(1, ids, logprobs)
    q = Distribution(logits)
    # the most probable tokens are those that the server names, whatever share of the rest another token has here
    q.top = ids[:, : min(TOP_K, *(len(of_row.ids) for of_row in known))]
    q.top_logits = q.logits.gather(-1, q.top)
    return q, unnamed


def _table(known: Sequence[KnownProbabilities], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, log-probabilities and whether they count ``[R, k]``; short rows repeat their first token."""
    width = max(len(of_row.ids) for of_row in known)
    ids = np.empty((len(known), width), dtype=np.int64)
    logprobs = np.empty((len(known), width))
    is_known = np.zeros((len(known), width), dtype=np.bool_)
    for row, of_row in enumerate(known):
        count = len(of_row.ids)
        ids[row, :count], ids[row, count:] = of_row.ids, of_row.ids[0]
        logprobs[row, :count], logprobs[row, count:] = of_row.logprobs, of_row.logprobs[0]
        is_known[row, :count] = True
    first, second, third = (torch.from_numpy(array).to(device) for array in (ids, logprobs, is_known))
    return first, second, third
