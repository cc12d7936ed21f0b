"""`GrammarState`: the place of one text in its grammar."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from minifloat.errors import UsageError


class GrammarPending(Exception):
    """The tokens that may follow are not known yet."""


class Computing(Protocol):
    """What computes the states of texts; `Grammars`."""

    def wait(self, states: Collection[GrammarState], seconds: float, *, until_added: bool = False) -> None:
        """Wait until the next tokens of texts are known, or seconds have passed."""

    def add(self, state: GrammarState, token: int) -> None:
        """Advance a text by a token; the answer comes later."""

    def close_state(self, state: GrammarState) -> None:
        """Forget a text."""


class GrammarState:
    """The place of one text in its grammar.

    Another process computes it. What it has found is in the attributes; `Grammars.wait` waits for it.

    Attributes:
        mask: A bit for each token that may follow; None: not known yet, or no token can follow.
    """

    def __init__(self, grammars: Computing, number: int, ready: Future[None]) -> None:
        self._grammars, self.number, self.ready = grammars, number, ready
        self.tokens: list[int] = []
        self.added, self.done = True, False
        self.mask: bytes | None = None
        self.error: UsageError | None = None
        self.late = False

    @property
    def known(self) -> bool:
        """Whether it is known which tokens may follow, or that none can."""
        return self.mask is not None or self.done or self.error is not None

    def forbid(self, logits: NDArray[np.float32]) -> None:
        """Set the logits ``[vocab]`` of the tokens that cannot follow to -Inf."""
        mask = self.mask
        if self.error is not None:
            raise self.error
        if mask is None:
            raise GrammarPending
        allowed = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")[: len(logits)].astype(bool)
        logits[: len(allowed)][~allowed] = -np.inf
        logits[len(allowed) :] = -np.inf

    def add(self, token: int) -> None:
        """Advance by a token; a token that cannot follow (a stop token of the request) changes nothing."""
        self._grammars.add(self, token)

    def wait_for(self, states: Collection[GrammarState], seconds: float, *, until_added: bool = False) -> None:
        """Call `Grammars.wait` of the grammars that this state belongs to."""
        self._grammars.wait(states, seconds, until_added=until_added)

    def close(self) -> None:
        """Forget the text."""
        self._grammars.close_state(self)
