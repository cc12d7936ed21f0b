"""The choice of the next tokens on the host, and its log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from minifloat.engine.grammar import GrammarPending
from minifloat.engine.sampling.draw import Logits
from minifloat.engine.sampling.state import SamplingState, await_grammars


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its probability."""

    token: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


class TokenChoice(NamedTuple):
    """The token that was chosen for a sequence; `logprob` and `top` (ids and log-probabilities) only on request."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


#: The next tokens of a sequence: one or more, of which only the last can be an error.
Choices = list[TokenChoice | Exception]


class NonFiniteLogits(Exception):
    """The logits of a sequence are NaN or Inf, those of the model or after the changes that the request asks for."""


class Postponed(Exception):
    """The choice of a token waits for the grammar, which does not say yet which tokens may follow."""

    def __init__(self, logits: Logits) -> None:
        super().__init__("the grammar has not answered yet")
        self.logits = logits.copy()


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[TokenChoice | Exception]:
    """Choose the next token of each sequence.

    numpy computes this in the calling thread: synchronizing torch's threads takes longer than these few rows.
    """
    await_grammars(states)
    rows: Logits = logits.numpy()
    choices: list[TokenChoice | Exception] = []
    for row, token, state in zip(rows, rows.argmax(axis=-1).tolist(), states, strict=True):
        try:
            choices.append(choose(row, state, token))
        except Exception as error:  # of this sequence; the others continue
            choices.append(error)
    return choices


def choose(logits: Logits, state: SamplingState, best: int, ahead: int = 0) -> TokenChoice:
    """Choose the next token of one sequence."""
    if not math.isfinite(logits[best]):
        raise NonFiniteLogits(f"the model's logits are not finite (one is {logits[best]})")
    params, token = state.params, best
    if params.changes_logits or not params.is_greedy:
        try:
            changed = state.change(logits) if params.changes_logits else logits
        except GrammarPending:
            raise Postponed(logits) from None
        if params.changes_logits:
            token = int(changed.argmax())
            if not math.isfinite(changed[token]):
                raise NonFiniteLogits(f"the largest logit after penalties, biases and grammar is {changed[token]}")
        if not params.is_greedy:
            token = state.draw(changed, ahead)
    if params.logprobs is None:
        return TokenChoice(token)
    shifted = logits.astype(np.float64) - logits[best]
    logprobs = shifted - np.log(np.exp(shifted).sum())
    top = np.argsort(-logprobs, kind="stable")[: params.logprobs]
    return TokenChoice(token, float(logprobs[token]), tuple(zip(top.tolist(), logprobs[top].tolist(), strict=True)))


def verify(logits: Tensor, states: Sequence[SamplingState], drafts: Sequence[Sequence[int]]) -> list[Choices]:
    """Choose the next tokens of each sequence: its drafts as long as the model chooses them too, and one more."""
    await_grammars(states)
    rows: Logits = logits.numpy()
    best = rows.argmax(axis=-1).tolist()
    first = 0
    chosen: list[Choices] = []
    for state, proposed in zip(states, drafts, strict=True):
        choices: Choices = []
        for ahead, draft in enumerate((*proposed, None)):
            try:
                choice = choose(rows[first + ahead], state, best[first + ahead], ahead)
            except Exception as error:  # of this sequence; the others continue
                choices.append(error)
                break
            choices.append(choice)
            if choice.token != draft:
                break
        first += len(proposed) + 1
        chosen.append(choices)
    return chosen
