"""`DraftItem`: the work of a draft model, in the place of a `WorkItem`."""

from __future__ import annotations

from typing import NamedTuple

from minifloat.engine.sequence import Sequence


class DraftItem(NamedTuple):
    """Tokens of a sequence and of its drafts that the draft model computes; only the last has logits."""

    sequence: Sequence
    start: int
    tokens: list[int]
    logits: int

    @property
    def end(self) -> int:
        """One past the position of the last token."""
        return self.start + len(self.tokens)
