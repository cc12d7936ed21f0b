"""How probable the tokens of a prompt are: log-probabilities of given tokens, from many rows of logits.

The sampler's are of one row per sequence, on the host. These are of pieces of prompts, and computed where the logits
are: only the numbers that are told of leave the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.serve.engine.sampling import Choice, NonFiniteLogits

#: Rows at a time: their float64 is twice as large as they are.
_ROWS = 32


def score(logits: Tensor, tokens: Sequence[int], alternatives: int) -> list[Choice]:
    """How probable each token was where it stands.

    Args:
        logits: float32 ``[n, vocab]``, on any device: before each token.
        tokens: The `n` tokens.
        alternatives: Report so many of the most probable tokens in each place.

    Returns:
        Each token with its log-probability, taken in float64, and those of the most probable ones, best first.

    Raises:
        NonFiniteLogits: The largest logit of a row is NaN or Inf.
    """
    count = min(max(alternatives, 1), logits.shape[1])
    choices: list[Choice] = []
    for start in range(0, len(tokens), _ROWS):
        rows = logits[start : start + _ROWS]
        taken = torch.tensor(tokens[start : start + _ROWS], device=logits.device)
        largest, ids = rows.topk(count)
        logs = torch.cat([rows.gather(1, taken[:, None]), largest], dim=1).double()
        logs -= rows.double().logsumexp(dim=1, keepdim=True)
        for token, (own, *top), best in zip(taken.tolist(), logs.tolist(), ids.tolist(), strict=True):
            if not math.isfinite(top[0]):
                raise NonFiniteLogits("the model's logits for the prompt are not finite")
            choices.append(Choice(token, own, tuple(zip(best, top, strict=True))[:alternatives]))
    return choices
