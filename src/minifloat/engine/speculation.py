"""Speculative decoding: cheap drafts of the next tokens, of which one step of the model computes all at once.

A decode step of one sequence takes as long as reading the weights, and a step of a few tokens hardly longer. A drafter
proposes tokens, the model computes the logits of all of them in one step, and the sequence takes those that the model
would have chosen itself, and one more (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
ICML 2023). Drafts change how many tokens a step gives, never which: `verify` compares each draft with the token that
the model chooses at that place, greedily or by a race (`minifloat.engine.sampling`).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from typing import Any, Protocol

from minifloat.engine.scheduler import WorkItem
from minifloat.engine.sequence import Sequence

_LOG = logging.getLogger(__name__)
#: Weight of a new trial in the acceptance.
_NEW = 0.1
#: What is assumed of the acceptance at first, as trials and successes; the running sums of trials stay near 1 / _NEW.
_TRIALS, _SUCCESSES = 5.0, 4.0
#: A time is the median of the last `_KEPT` measurements, and counts from `_ENOUGH` on: one slow step says little.
_KEPT, _ENOUGH = 9, 3
#: Every so many steps a length beside the best is tried for `_ENOUGH` steps, so that a change is noticed.
_TRY_EVERY = 96


@dataclass
class SpeculationStats:
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def acceptance(self) -> float:
        """Accepted drafts over all drafts; 0 without drafts."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gets in a step with drafts, on average; 0 without drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 0.0

    def verified(self, proposed: int, accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += proposed
        self.accepted_tokens += accepted
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        positions = zip(self.accepted_per_position, other.accepted_per_position, strict=True)
        return SpeculationStats(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted_tokens + other.accepted_tokens,
            [first + second for first, second in positions],
            self.seconds + other.seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return counts and rates as JSON values, the counts named as vLLM's metrics."""
        return {
            "num_drafts": self.drafts,
            "num_draft_tokens": self.draft_tokens,
            "num_accepted_tokens": self.accepted_tokens,
            "num_accepted_tokens_per_pos": self.accepted_per_position,
            "acceptance_rate": self.acceptance,
            "tokens_per_step": self.tokens_per_step,
            "draft_seconds": self.seconds,
        }


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
    def __init__(
        self,
        drafter: Drafter,
        room: Callable[[Sequence, int], int],
        *,
        longest: int,
        weight_bytes: int,
    ) -> None:
        self.drafter, self.longest = drafter, longest
        self.stats, self.last = self._nothing(), self._nothing()
        self._room, self._fixed = room, False  # whether drafts are always as long as they may be
        self._length = DraftLength(longest, drafter.weight_bytes / max(weight_bytes, 1))
        self._started = 0.0

    def propose(self, items: list[WorkItem]) -> list[WorkItem]:
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
        if self._started:
            self._length.computed(sum([item.end - item.start for item in items]), time.perf_counter() - self._started)

    def verified(self, proposed: int, accepted: int) -> None:
        self.last.verified(proposed, accepted)
        self._length.verified(proposed, accepted)

    def _nothing(self) -> SpeculationStats:
        return SpeculationStats(accepted_per_position=[0] * self.longest)

    def _count(self, sequence: Sequence, longest: int) -> int:
        left = sequence.text.thinking_left  # a step may use up the budget of the thinking, but not go on after it
        longest = min(longest, sequence.max_length - len(sequence.tokens) - 1, longest if left is None else left - 1)
        return self._room(sequence, longest) if longest > 0 else 0


# Penalties, grammars and `min_tokens` make a choice depend on the tokens before it beyond the model itself.
def _may_speculate(item: WorkItem) -> bool:
    return not item.sequence.request.params.weighs_tokens and item.sequence.sampling.forced is None


# With the acceptance a of one draft, k drafts give (1 - a^(k+1)) / (1 - a) tokens per step on average; a step takes the
# time of k drafts and of a step of the model with k + 1 tokens per sequence. A length that was not measured often
# enough has the time of the next smaller one that was: longer drafts are tried until their times are known.
class DraftLength:
    """Chooses the number of drafts per sequence that gives the most tokens per second."""

    def __init__(self, longest: int, cost: float) -> None:
        self._longest, self._cost = longest, cost
        self._trials, self._successes = _TRIALS, _SUCCESSES
        self._model, self._draft = _Times(), _Times()
        self._steps = 0

    @property
    def acceptance(self) -> float:
        """The share of drafts that are accepted, of those whose drafts before them were."""
        return self._successes / self._trials

    def choose(self, sequences: int) -> int:
        self._steps += 1
        best = max(range(self._longest + 1), key=lambda count: self._rate(sequences, count))
        period, step = divmod(self._steps, _TRY_EVERY)
        if not period or step >= _ENOUGH:
            return best
        # above and below in turn: a length that was slow for a while is not tried again otherwise
        return min(best + 1, self._longest) if period % 2 else max(best - 1, 0)

    def drafted(self, sequences: int, seconds: float) -> None:
        self._draft.note(sequences, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        self._model.note(tokens, seconds)

    def verified(self, proposed: int, accepted: int) -> None:
        """Note how many drafts of a sequence were accepted; the first that is not ends its trials."""
        trials = min(accepted + 1, proposed)
        keep = (1 - _NEW) ** trials
        self._trials = self._trials * keep + trials
        self._successes = self._successes * keep + accepted

    def _rate(self, sequences: int, count: int) -> float:
        a = min(self.acceptance, 0.999)
        model = self._model.of(sequences * (1 + count))
        if model is None:
            model = 1.0
        draft = self._draft.of(sequences)
        if draft is None:
            known = self._model.of(sequences)
            draft = self._cost * (1.0 if known is None else known)
        return (1 - a ** (count + 1)) / (1 - a) / (count * draft + model)


class _Times:
    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def note(self, size: int, seconds: float) -> None:
        last = self._last.setdefault(size, deque(maxlen=_KEPT))
        last.append(seconds)
        if len(last) >= _ENOUGH:
            self._medians[size] = statistics.median(last)

    def of(self, size: int) -> float | None:
        """Return the time of the largest known size that is not larger, else of the smallest; None without any."""
        known = self._medians.get(size)
        if known is not None or not self._medians:
            return known
        smaller = [other for other in self._medians if other < size]
        return self._medians[max(smaller) if smaller else min(self._medians)]
