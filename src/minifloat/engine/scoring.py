"""Log-probabilities of the tokens of a prompt.

The sampler computes log-probabilities of one row per sequence, on the host. Pieces of prompts have many rows, so theirs
are computed on the device of the logits, and only the reported numbers leave the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.engine.sampling import NonFiniteLogits, TokenChoice

#: Rows that are converted to float64 at a time, which takes twice their memory.
_ROWS = 32


def score(logits: Tensor, tokens: Sequence[int], alternatives: int) -> list[TokenChoice]:
    """Return the log-probability of each token at its position."""
    count = min(max(alternatives, 1), logits.shape[1])
    choices: list[TokenChoice] = []
    for start in range(0, len(tokens), _ROWS):
        rows = logits[start : start + _ROWS]
        taken = torch.tensor(tokens[start : start + _ROWS], device=logits.device)
        largest, ids = rows.topk(count)
        logs = torch.cat([rows.gather(1, taken[:, None]), largest], dim=1).double()
        logs -= rows.double().logsumexp(dim=1, keepdim=True)
        for token, (own, *top), best in zip(taken.tolist(), logs.tolist(), ids.tolist(), strict=True):
            if not math.isfinite(top[0]):
                raise NonFiniteLogits("the model's logits for the prompt are not finite")
            choices.append(TokenChoice(token, own, tuple(zip(best, top, strict=True))[:alternatives]))
    return choices
