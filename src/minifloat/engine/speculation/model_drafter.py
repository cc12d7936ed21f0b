"""Drafts by a smaller or coarser model, which the decoder of the CPU runs."""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequences

from minifloat.engine.native import NativeRunner
from minifloat.engine.sampling import Logits, SamplingState
from minifloat.engine.sequence import Sequence
from minifloat.engine.speculation.draft_item import DraftItem

#: Tokens of a sequence that the draft model computes at a time where it has fallen behind.
_PIECE = 512


class ModelDrafter:
    """Proposes the tokens that a draft model chooses.

    A draft model with layers like the model's works in the model's own KV cache: it reads the keys and values of the
    model, which are at hand and better than its own, and writes those of its drafts to places that the model overwrites
    in the same step. It then needs no cache and computes no prompt. Other draft models have a cache of their own, in
    which each sequence has the blocks of the same numbers; they compute each sequence from its first token.
    """

    def __init__(self, name: str, runner: NativeRunner, *, shares_cache: bool, memory: int) -> None:
        self.name, self.memory, self.shares_cache = name, memory, shares_cache
        self.weight_bytes = runner.weight_bytes
        self._runner = runner
        self._computed: dict[str, int] = {}  # tokens that a cache of its own holds, by request id

    def propose(self, sequences: Sequences[Sequence], counts: Sequences[int]) -> list[tuple[int, ...]]:
        """Propose tokens, as `Drafter.propose`."""
        proposals: list[list[int]] = [[] for _ in sequences]
        active = list(range(len(sequences)))
        items = [self._catch_up(sequence) for sequence in sequences]
        while active:
            rows = self._runner.run(items).numpy()
            best = rows.argmax(axis=-1).tolist()
            for row, token, index in zip(rows, best, active, strict=True):
                state, ahead = sequences[index].sampling, len(proposals[index])
                proposals[index].append(_draft(row, state, token, ahead))
            active = [index for index in active if len(proposals[index]) < counts[index]]
            items = [_next_item(sequences[index], proposals[index]) for index in active]
        if not self.shares_cache:
            for sequence in sequences:
                self._computed[sequence.request_id] = len(sequence.tokens)
        return [tuple(proposal) for proposal in proposals]

    def release(self, sequence: Sequence) -> None:
        """Forget the state of a sequence that has lost its blocks or is finished."""
        self._computed.pop(sequence.request_id, None)

    def _catch_up(self, sequence: Sequence) -> DraftItem:
        """Compute all tokens of a sequence that are missing in the cache but the last piece, and return that."""
        last = len(sequence.tokens) - 1
        if self.shares_cache:
            return DraftItem(sequence, last, sequence.tokens[last:], 1)
        start = min(self._computed.get(sequence.request_id, 0), last)
        while last + 1 - start > _PIECE:
            self._runner.run([DraftItem(sequence, start, sequence.tokens[start : start + _PIECE], 0)])
            start += _PIECE
        return DraftItem(sequence, start, sequence.tokens[start:], 1)


def _next_item(sequence: Sequence, proposal: Sequences[int]) -> DraftItem:
    return DraftItem(sequence, len(sequence.tokens) + len(proposal) - 1, [proposal[-1]], 1)


def _draft(logits: Logits, state: SamplingState, best: int, ahead: int) -> int:
    """Return the token that the draft model chooses; logits that are not finite give any token."""
    if state.params.is_greedy or not math.isfinite(logits[best]):
        return best
    return state.draw(logits, ahead)
