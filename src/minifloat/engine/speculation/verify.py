"""Compares drafts with the tokens that the model chooses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minifloat.engine.sampling import (
    Logits,
    SamplingState,
    TokenChoice,
    await_grammars,
    choose,
)

#: The next tokens of a sequence: one or more, of which only the last can be an error.
Choices = list[TokenChoice | Exception]


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
