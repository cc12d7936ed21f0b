"""What proposes tokens: a smaller or coarser model, or the text so far."""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequences

from minifloat.engine.native import NativeRunner
from minifloat.engine.sampling import Logits, SamplingState
from minifloat.engine.scheduler import WorkItem
from minifloat.engine.sequence import Sequence

#: Tokens of a sequence that a draft model computes at a time where it has fallen behind.
_PIECE = 512
#: Lengths of the endings that are looked up, the longest first.
_LENGTHS = (4, 3, 2)
#: Only this many last tokens are searched, so that a search takes microseconds in a long context.
_SEARCHED = 8192
_BYTES = 4


class PromptLookup:
    """Proposes the tokens that followed the last occurrence of the sequence's last tokens, in prompt or output.

    Good where output repeats its input: summaries, edits of code, extraction (Saxena, "Prompt Lookup Decoding", 2023;
    "ngram" in vLLM).
    """

    name = "prompt"
    weight_bytes = 0
    memory = 0

    def propose(self, sequences: Sequences[Sequence], counts: Sequences[int]) -> list[tuple[int, ...]]:
        """Propose tokens, as `Drafter.propose`."""
        return [_following(sequence.tokens, count) for sequence, count in zip(sequences, counts, strict=True)]

    def release(self, sequence: Sequence) -> None:
        """Do nothing: there is no state."""


def _following(tokens: Sequences[int], count: int) -> tuple[int, ...]:
    """Return at most `count` tokens that followed the last tokens before, none if those are new."""
    first = max(0, len(tokens) - _SEARCHED)
    text = b"".join([token.to_bytes(_BYTES, "little") for token in tokens[first:]])
    for length in _LENGTHS:
        if len(tokens) - first <= length:
            continue
        ending, end = text[-length * _BYTES :], len(text) - 1
        while (found := text.rfind(ending, 0, end)) >= 0:
            if found % _BYTES == 0:
                start = first + found // _BYTES + length
                return tuple(tokens[start : start + count])
            end = found + len(ending) - 1
    return ()


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
        """Propose tokens, as `Drafter.propose`; they stand in the sequences meanwhile."""
        lengths = [len(sequence.tokens) for sequence in sequences]
        active, items = list(range(len(sequences))), [self._catch_up(sequence) for sequence in sequences]
        try:
            while active:
                rows = self._runner.run(items).numpy()
                for row, token, index in zip(rows, rows.argmax(axis=-1).tolist(), active, strict=True):
                    sequence = sequences[index]
                    ahead = len(sequence.tokens) - lengths[index]
                    sequence.tokens.append(_draft(row, sequence.sampling, token, ahead))
                active = [index for index in active if len(sequences[index].tokens) - lengths[index] < counts[index]]
                items = [
                    WorkItem(sequences[index], len(sequences[index].tokens) - 1, len(sequences[index].tokens))
                    for index in active
                ]
            if not self.shares_cache:
                self._computed |= {each.request_id: length for each, length in zip(sequences, lengths, strict=True)}
            return [tuple(each.tokens[length:]) for each, length in zip(sequences, lengths, strict=True)]
        finally:
            for sequence, length in zip(sequences, lengths, strict=True):
                del sequence.tokens[length:]

    def release(self, sequence: Sequence) -> None:
        """Forget the state of a sequence that has lost its blocks or is finished."""
        self._computed.pop(sequence.request_id, None)

    def _catch_up(self, sequence: Sequence) -> WorkItem:
        """Compute all tokens of a sequence that are missing in the cache but the last piece, and return that."""
        length = len(sequence.tokens)
        if self.shares_cache:
            return WorkItem(sequence, length - 1, length)
        start = min(self._computed.get(sequence.request_id, 0), length - 1)
        while length - start > _PIECE:
            self._runner.run([WorkItem(sequence, start, start + _PIECE)])
            start += _PIECE
        return WorkItem(sequence, start, length)


def _draft(logits: Logits, state: SamplingState, best: int, ahead: int) -> int:
    """Return the token that the draft model chooses; logits that are not finite give any token."""
    if state.params.is_greedy or not math.isfinite(logits[best]):
        return best
    return state.draw(logits, ahead)
