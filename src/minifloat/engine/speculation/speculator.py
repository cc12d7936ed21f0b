"""`Speculator`: adds drafts to the work of steps, and learns how many pay."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from typing import Protocol

from minifloat.engine.scheduler import WorkItem
from minifloat.engine.sequence import Sequence
from minifloat.engine.speculation.draft_length import DraftLength
from minifloat.engine.speculation.stats import SpeculationStats

_LOG = logging.getLogger(__name__)


class Drafter(Protocol):
    """Proposes tokens.

    Attributes:
        name: "self", "model" or "prompt".
        weight_bytes: Bytes of the weights that one draft of one sequence is multiplied with.
        memory: Bytes of memory that the drafter takes beside the model.
    """

    name: str
    weight_bytes: int
    memory: int

    def propose(self, sequences: Sequences[Sequence], counts: Sequences[int]) -> list[tuple[int, ...]]:
        """Propose the next tokens of sequences that wait for one token.

        Args:
            sequences: The sequences; each has blocks for its tokens and its drafts.
            counts: The number of drafts of each at most, at least 1.
        """

    def release(self, sequence: Sequence) -> None:
        """Forget the state of a sequence that has lost its blocks or is finished."""


class Speculator:
    """Decides which sequences get how many drafts.

    Sequences get none whose parameters make a token's choice depend on the tokens before it beyond the model itself
    (penalties, grammars, `min_tokens`), and none while a step computes prompts too.
    """

    def __init__(
        self,
        drafter: Drafter,
        room: Callable[[Sequence, int], int],
        *,
        longest: int,
        weight_bytes: int,
        fixed: bool = False,
    ) -> None:
        self.drafter, self.longest = drafter, longest
        self.stats, self.last = self._nothing(), self._nothing()
        self._room, self._fixed = room, fixed
        self._length = DraftLength(longest, drafter.weight_bytes / max(weight_bytes, 1))
        self._started = 0.0

    def propose(self, items: list[WorkItem]) -> list[WorkItem]:
        """Return the work of the next step with drafts added."""
        self.stats, self.last = self.stats + self.last, self._nothing()
        able = [item.sequence for item in items if _may_speculate(item)]
        self._started = 0.0
        if not able or not all(item.samples and item.end - item.start == 1 for item in items):
            return items
        longest = self.longest if self._fixed else self._length.choose(len(able))
        counts = [self._count(sequence, longest) for sequence in able]
        drafted = [(sequence, count) for sequence, count in zip(able, counts, strict=True) if count > 0]
        self._started = time.perf_counter()
        if not drafted:
            return items
        sequences = [sequence for sequence, _ in drafted]
        try:
            proposals = self.drafter.propose(sequences, [count for _, count in drafted])
        except Exception:  # the model does not need the drafts
            _LOG.exception("a step has no drafts, because drafting failed")
            self._started = 0.0
            return items
        now = time.perf_counter()
        self.last.seconds = now - self._started
        self._length.drafted(len(sequences), (now - self._started) / max(count for _, count in drafted))
        self._started = now
        drafts = {s.request_id: proposal for s, proposal in zip(sequences, proposals, strict=True)}
        return [
            item._replace(end=item.end + len(added), drafts=added)
            if (added := drafts.get(item.sequence.request_id, ()))
            else item
            for item in items
        ]

    def computed(self, items: Sequences[WorkItem]) -> None:
        """Note that the model has computed a step."""
        if self._started:
            self._length.computed(sum([item.end - item.start for item in items]), time.perf_counter() - self._started)

    def verified(self, proposed: int, accepted: int) -> None:
        """Note how many drafts of a sequence were accepted."""
        self.last.verified(proposed, accepted)
        self._length.verified(proposed, accepted)

    def _nothing(self) -> SpeculationStats:
        return SpeculationStats(accepted_per_position=[0] * self.longest)

    def _count(self, sequence: Sequence, longest: int) -> int:
        """Return for how many drafts a sequence has room."""
        longest = min(longest, sequence.max_length - len(sequence.tokens) - 1)
        return self._room(sequence, longest) if longest > 0 else 0


def _may_speculate(item: WorkItem) -> bool:
    return not item.sequence.request.params.changes_logits
