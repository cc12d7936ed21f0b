"""Copies of the states of sequences, from which others with the same beginning continue.

Blocks of the KV cache can be shared at every length, because they keep all tokens. A state of a gated delta rule is
that of one length alone, so a sequence can only begin behind a prefix whose state somebody has kept. Copies are made at
the end of each prompt, and where a prompt parts from one that was computed before: what both begin with, such as a
system prompt, is then likely to come again. They are identified by the digest of the block that they end with
(`minifloat.engine.cache`). The copy that has been unused for the longest time makes room for a new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from minifloat.kernels.decoder import BLOCK_TOKENS, SequenceStates

#: Tokens that a copy must save at least: a piece of a prompt that ends at a copy costs a step of its own.
_LEAST_TOKENS = 64


class StateSnapshots:
    """The copies, in slots of the states' own memory."""

    def __init__(self, states: SequenceStates, slots: Sequence[int]) -> None:
        self._states = states
        self._free = list(slots)
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # the longest unused first

    def longest(self, digests: Sequence[bytes]) -> int:
        """Return how many of the first blocks of a sequence end with a copy."""
        return next((count for count in range(len(digests), 0, -1) if digests[count - 1] in self._kept), 0)

    def restore(self, digest: bytes, slot: int) -> None:
        """Begin a sequence with the copy at the end of a block."""
        self._kept.move_to_end(digest)
        self._states.copy(self._kept[digest], slot)

    def keep(self, digest: bytes, slot: int) -> None:
        """Copy the state of a sequence that has seen all tokens up to the end of a block."""
        if digest not in self._kept:
            self._kept[digest] = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
            self._states.copy(slot, self._kept[digest])
        self._kept.move_to_end(digest)

    @staticmethod
    def ends(start: int, length: int, known: int) -> tuple[int, ...]:
        """Return the numbers of tokens behind which the state of a new sequence should be kept, in order."""
        ends = sorted({known * BLOCK_TOKENS, (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS})
        return tuple(end for end in ends if end - start >= _LEAST_TOKENS)
