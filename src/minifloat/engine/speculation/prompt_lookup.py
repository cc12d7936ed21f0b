"""Drafts without a model: what followed the same tokens before."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from minifloat.engine.sequence import Sequence

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
