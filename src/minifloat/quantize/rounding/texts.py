"""The three parts of calibration text: for statistics, for choices, and for the figures of the report."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from minifloat.calibration.data import Batch, CalibrationSet, permuted
from minifloat.errors import DataError
from minifloat.quantize.estimate import held_out_of


@dataclass(frozen=True)
class SplitText:
    """Whole sequences of calibration text, each in one part."""

    kept: CalibrationSet  # statistics come from it
    choosing: CalibrationSet  # folds, factors and formats are chosen on it
    reported: CalibrationSet  # nothing looks at it but the figures of the report

    @classmethod
    def of(cls, texts: CalibrationSet, fraction: float) -> SplitText:
        """Hold out a fraction of the sequences, half of them, the last ones of the text, to be reported only."""
        size = len(texts.sequences)
        count = held_out_of(size, fraction)
        if not fraction or count >= size:
            raise DataError(
                f"cannot hold out {fraction} of {size} sequences to choose and judge codes on, and keep some: give a "
                "larger fraction, or ask for more sequences"
            )
        rest = size - count // 2  # sequences of one document follow each other: the border is crossed once
        choosing = set(permuted(range(rest), random.Random("held out"))[: count - count // 2])
        parts = ([n for n in range(rest) if n not in choosing], sorted(choosing), range(rest, size))
        return cls(*(CalibrationSet(tuple(texts.sequences[n] for n in part), texts.record) for part in parts))

    @property
    def parts(self) -> tuple[CalibrationSet, CalibrationSet, CalibrationSet]:
        return self.kept, self.choosing, self.reported


@dataclass(frozen=True)
class SplitBatches:
    """The sequences of a split text in batches, each of one part, in the order of the parts."""

    batches: tuple[Batch, ...]
    first_chosen_on: int  # number of the first batch that choices are made on
    first_reported: int  # number of the first batch that is only reported

    @classmethod
    def of(cls, texts: SplitText, join: Callable[[Iterable[Sequence[int]]], Sequence[Batch]]) -> SplitBatches:
        """Join neighbours of each part to batches."""
        kept, choosing, reported = (tuple(join(part.sequences)) for part in texts.parts)
        return cls(kept + choosing + reported, len(kept), len(kept) + len(choosing))

    def name(self, number: int) -> str:
        """Return which sequences are in a batch, in words."""
        first = sum(map(len, self.batches[:number]))
        last = first + len(self.batches[number]) - 1
        return f"sequence {first}" if first == last else f"sequences {first} to {last}"


def first_sequences(sequences: Sequence[Sequence[int]], tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return the first sequences with at most so many tokens, at least one."""
    chosen: list[tuple[int, ...]] = []
    for sequence in sequences:
        tokens -= len(sequence)
        if chosen and tokens < 0:
            break
        chosen.append(tuple(sequence))
    return tuple(chosen)
