"""Samples of the inputs of a layer's stages, on which folds are chosen and judged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.quantize.rounding.stages import Stage
from minifloat.quantize.rounding.taps import StoredReadings

#: Rows of a sample of calibration text and of held-out text.
_ROWS = {False: 1024, True: 512}
#: Sequences that the rows are spread over.
_SEQUENCES = 32


class FoldSample:
    """Returns sampled inputs of a stage and slot, as `minifloat.quantize.rounding.layer_fold.SampleInputs`."""

    def __init__(self, readings: StoredReadings, stages: Sequence[Stage], first_held_out: int, sequences: int) -> None:
        self._readings, self._stages = readings, stages
        self._numbers = {False: range(first_held_out), True: range(first_held_out, sequences)}
        self._by_slot: dict[tuple[int, bool], dict[int, Tensor]] = {}

    def __call__(self, number: int, slot: int, held_out: bool) -> Tensor | None:
        """Return rows ``[T, K]`` of the inputs; None if no token reached the slot."""
        if (number, held_out) not in self._by_slot:
            self._by_slot = {(number, held_out): self._read(number, held_out)} | {
                key: rows for key, rows in self._by_slot.items() if key[0] == number
            }
        return self._by_slot[number, held_out].get(slot if self._stages[number].outer else 0)

    def _read(self, number: int, held_out: bool) -> dict[int, Tensor]:
        """Return sampled rows of a stage by slot; of a stage whose slots share their input under slot 0."""
        numbers = self._numbers[held_out]
        chosen = numbers[:: max(len(numbers) // _SEQUENCES, 1)]
        per_sequence = -(-_ROWS[held_out] // max(len(chosen), 1))
        rows: dict[int, list[Tensor]] = {}
        for sequence in chosen:
            reading = self._readings.read(sequence, number)
            if reading.slots is None:
                step = max(len(reading.inputs) // per_sequence, 1)
                rows.setdefault(0, []).append(reading.inputs[::step])
                continue
            for slot in torch.unique(reading.slots).tolist():
                rows.setdefault(slot, []).append(reading.inputs[reading.slots == slot])
        return {slot: torch.cat(parts)[: _ROWS[held_out]].float() for slot, parts in rows.items()}
