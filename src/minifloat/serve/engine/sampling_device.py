"""`minifloat.serve.engine.sampling` where the logits are: the same choices, without bringing them to the host.

Rows that take the most probable token, or draw by temperature, top_k, top_p and min_p alone, are chosen on the device,
with the number that the host's generator gives for seed and position. The logits of the other rows (penalties, biases,
grammars, log-probabilities) come to the host in the same transfer as the chosen tokens, and go the host's way. All is
float64, as there; sums are taken in another order, so two tokens whose border a draw hits to 15 digits may be confused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minifloat.serve.engine.device.transfer import fetch, send
from minifloat.serve.engine.sampling import Choice, NonFiniteLogits, SamplingState
from minifloat.serve.engine.sampling import sample as sample_on_host


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[Choice | Exception]:
    """Choose the next token of each sequence; waits for the device once.

    Args:
        logits: float32 ``[sequences, vocab]``, on any device.
        states: Of the sequences.

    Returns:
        As `minifloat.serve.engine.sampling.sample`.
    """
    others = [row for row, state in enumerate(states) if _needs_host(state)]
    draws = [row for row, state in enumerate(states) if not (_needs_host(state) or state.params.is_greedy)]
    draws.sort(key=lambda row: _limited(states[row]))
    plain = sum(not _limited(states[row]) for row in draws)
    table = [(row, *_settings(states[row])) for row in draws] + [(row, *[0.0] * _SETTINGS) for row in others]
    settings = send(np.array(table, dtype=np.float64).reshape(-1, 1 + _SETTINGS), logits.device)
    tokens = logits.argmax(dim=-1)
    best = logits.gather(1, tokens[:, None])[:, 0]
    for part, limited in ((slice(0, plain), False), (slice(plain, len(draws)), True)):
        if part.start < part.stop:
            rows = settings[part, 0].long()
            tokens[rows] = draw(logits[rows], settings[part, 1:], limited=limited)
    chosen, rest = fetch(
        torch.stack([tokens.double(), best.double()]), logits[settings[len(draws) :, 0].long()] if others else best[:0]
    )
    choices: list[Choice | Exception] = [
        _choice(int(token), value) for token, value in zip(*chosen.tolist(), strict=True)
    ]
    for row, choice in zip(
        others, sample_on_host(rest, [states[row] for row in others]) if others else (), strict=True
    ):
        choices[row] = choice
    return choices


def _choice(token: int, logit: float) -> Choice | Exception:
    if not math.isfinite(logit):
        return NonFiniteLogits(f"the model's logits are not finite (one is {logit})")
    return Choice(token)


def _needs_host(state: SamplingState) -> bool:
    return state.params.changes_logits or state.params.logprobs is not None


def _limited(state: SamplingState) -> bool:
    """Whether only the most probable tokens can be drawn."""
    return bool(state.params.top_k or state.params.min_p or state.params.top_p < 1.0)


def _settings(state: SamplingState) -> tuple[float, ...]:
    params = state.params
    return params.temperature, params.top_k, params.top_p, params.min_p, state.uniform()


_SETTINGS = 5


def draw(logits: Tensor, settings: Tensor, *, limited: bool) -> Tensor:
    """Draw a token of each row, as `minifloat.serve.engine.sampling.draw` does.

    Args:
        logits: float32 ``[m, vocab]``.
        settings: float64 ``[m, 5]``: temperature, top_k, top_p, min_p, and a number in [0, 1).
        limited: Whether top_k, top_p and min_p are looked at: rows are sorted then.

    Returns:
        int64 ``[m]``.
    """
    temperature, top_k, top_p, min_p, uniform = settings[:, :, None].unbind(1)
    if not limited:
        scaled = logits.double() / temperature
        return _invert((scaled - scaled.amax(dim=1, keepdim=True)).exp(), uniform)[:, 0]
    ordered, tokens = logits.sort(dim=1, descending=True, stable=True)
    scaled = ordered.double() / temperature
    weights = (scaled - scaled[:, :1]).exp()
    rank = torch.arange(logits.shape[1], device=logits.device)
    kept = ((top_k == 0) | (rank < top_k)) & (weights >= min_p)
    weights = torch.where(kept, weights, 0.0)
    before = weights.cumsum(dim=1) - weights
    kept = (top_p == 1.0) | (before < top_p * weights.sum(dim=1, keepdim=True))
    return tokens.gather(1, _invert(torch.where(kept, weights, 0.0), uniform))[:, 0]


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """``[m, 1]``: the first index whose cumulative weight is above `uniform` of the whole."""
    sums = weights.cumsum(dim=1)
    whole = sums[:, -1:]
    last = (sums < whole).sum(dim=1, keepdim=True)  # nothing follows it
    return torch.minimum(torch.searchsorted(sums, uniform * whole, right=True), last)
