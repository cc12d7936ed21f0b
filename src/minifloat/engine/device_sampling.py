"""Chooses tokens on the device: the choices of `minifloat.engine.sampling`, without copying logits to the host.

Rows that take the most probable token, or draw by temperature, top_k, top_p and min_p alone, are chosen on the device,
with the number that the host's generator gives for seed and position. The logits of the other rows (penalties, biases,
grammars, log-probabilities) are copied to the host together with the chosen tokens, and chosen there. Both compute in
float64; sums are taken in another order, so a draw that hits the border of two tokens to 15 digits may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from minifloat.engine.sampling import NonFiniteLogits, SamplingParams, SamplingState, TokenChoice
from minifloat.engine.sampling import sample as sample_on_host
from minifloat.engine.transfer import Fetch, send

#: The largest top_k whose tokens are searched for; for larger ones, and without top_k, all tokens are sorted.
_MOST_TOP_K = 1024
_LOW_31_BITS = 0x7FFFFFFF


class PendingChoices:
    """The next tokens of some sequences, which the device chooses while the host does other work."""

    def __init__(self, tokens: Tensor, best: Tensor, logits: Tensor | None, states: dict[int, SamplingState]) -> None:
        self.tokens = tokens if logits is None else None
        self._states = states
        numbers = torch.stack([tokens.double(), best.double()])
        self._fetch = Fetch(numbers) if logits is None else Fetch(numbers, logits)

    def wait(self) -> list[TokenChoice | Exception]:
        """Return the choices, as `minifloat.engine.sampling.sample`; waits for the device once."""
        first, *rest = self._fetch.wait()
        numbers = first.numpy()
        choices: list[TokenChoice | Exception] = list(map(TokenChoice, numbers[0].astype(np.int64).tolist()))
        for row in np.flatnonzero(~np.isfinite(numbers[1])).tolist():
            choices[row] = NonFiniteLogits(f"the model's logits are not finite (one is {numbers[1, row]})")
        for logits in rest:
            chosen = sample_on_host(logits, list(self._states.values()))
            for row, choice in zip(self._states, chosen, strict=True):
                choices[row] = choice
        return choices


def sample(logits: Tensor, states: Sequence[SamplingState], *, ahead: int = 0) -> PendingChoices:
    """Begin to choose the next token of each sequence; does not wait for the device."""
    groups: dict[_Kind, list[int]] = {kind: [] for kind in _Kind}
    for row, state in enumerate(states):
        groups[_kind(state.params)].append(row)
    tokens = logits.argmax(dim=-1)
    best = logits.gather(1, tokens[:, None])[:, 0]
    for kind in (_Kind.DRAWN, _Kind.TOP_K, _Kind.SORTED):
        if groups[kind]:
            settings = np.array([_settings(row, states[row], ahead) for row in groups[kind]])
            table = send(settings, logits.device)
            most = {_Kind.DRAWN: 0, _Kind.TOP_K: int(settings[:, 2].max()), _Kind.SORTED: logits.shape[1]}[kind]
            if len(groups[kind]) == len(states):
                tokens = draw(logits, table[:, 1:], most=most)
            else:
                rows = table[:, 0].long()
                tokens[rows] = draw(logits[rows], table[:, 1:], most=most)
    others = groups[_Kind.HOST]
    of_others = logits[send(np.array(others), logits.device)] if others else None
    return PendingChoices(tokens, best, of_others, {row: states[row] for row in others})


class _Kind(Enum):
    GREEDY = "the most probable one"
    DRAWN = "drawn from all"
    TOP_K = "drawn from a few of the most probable ones"
    SORTED = "drawn from the most probable ones, of which there may be many"
    HOST = "on the host"


def _kind(params: SamplingParams) -> _Kind:
    if params.changes_logits or params.logprobs is not None:
        return _Kind.HOST
    if params.is_greedy:
        return _Kind.GREEDY
    if 0 < params.top_k <= _MOST_TOP_K:
        return _Kind.TOP_K
    return _Kind.SORTED if params.limits else _Kind.DRAWN


def _settings(row: int, state: SamplingState, ahead: int) -> tuple[float, ...]:
    params = state.params
    return float(row), params.temperature, params.top_k, params.top_p, params.min_p, state.uniform(ahead)


def draw(logits: Tensor, settings: Tensor, *, most: int) -> Tensor:
    """Draw a token of each row, as `minifloat.engine.sampling` does."""
    temperature, top_k, top_p, min_p, uniform = settings[:, :, None].unbind(1)
    if not most:
        shifted = logits.double() - logits.amax(dim=1, keepdim=True)
        return _invert((shifted / temperature).exp(), uniform)[:, 0]
    if most < logits.shape[1]:
        tokens = _most_probable(logits, most)
        ordered = logits.gather(1, tokens)
    else:
        ordered, tokens = logits.sort(dim=1, descending=True, stable=True)
    weights = ((ordered.double() - ordered[:, :1]) / temperature).exp()
    rank = torch.arange(ordered.shape[1], device=logits.device)
    kept = ((top_k == 0) | (rank < top_k)) & (weights >= min_p)
    weights = torch.where(kept, weights, 0.0)
    before = weights.cumsum(dim=1) - weights
    kept = (top_p == 1.0) | (before < top_p * weights.sum(dim=1, keepdim=True))
    return tokens.gather(1, _invert(torch.where(kept, weights, 0.0), uniform))[:, 0]


def _most_probable(logits: Tensor, count: int) -> Tensor:
    """Return int64 ``[m, count]``: the most probable tokens in the order of a stable sort, which takes longer."""
    # `topk` leaves the order of equal logits open, so it compares integers that contain logit and token
    bits = (logits + 0.0).view(torch.int32)  # the sum makes -0 and 0 equal
    ordered = torch.where(bits < 0, bits ^ _LOW_31_BITS, bits).long()  # as integers in the order of the logits
    tokens = torch.arange(logits.shape[1], device=logits.device)
    largest = ((ordered << 32) | (_LOW_31_BITS - tokens)).topk(count).values
    return _LOW_31_BITS - (largest & _LOW_31_BITS)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return ``[m, 1]``: the first index whose cumulative weight is above `uniform` times the total."""
    sums = weights.cumsum(dim=1)
    whole = sums[:, -1:]
    last = (sums < whole).sum(dim=1, keepdim=True)  # the last index with a weight
    return torch.minimum(torch.searchsorted(sums, uniform * whole, right=True), last)
