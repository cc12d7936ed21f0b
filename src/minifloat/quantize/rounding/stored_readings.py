"""The inputs of all stages of a layer in the original model, kept on disk between the passes over the layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from minifloat.calibration.layerwise.storage import StoredTensor, TensorFile
from minifloat.quantize.rounding.taps import Reading


@dataclass(frozen=True)
class _Place:
    inputs: StoredTensor
    slots: Tensor | None
    tokens: Tensor | None
    residual: StoredTensor | None


class StoredReadings:
    """Keeps the readings of each sequence in a file. The indices of experts stay in memory."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        self._places: dict[tuple[int, int], _Place] = {}

    def keep(self, sequence: int, readings: Sequence[Reading]) -> None:
        """Keep the readings of one sequence, one per stage."""
        for stage, reading in enumerate(readings):
            residual = None if reading.residual is None else self._file.append(reading.residual)
            self._places[sequence, stage] = _Place(
                self._file.append(reading.inputs), reading.slots, reading.tokens, residual
            )

    def read(self, sequence: int, stage: int) -> Reading:
        """Return the reading of a stage for one sequence."""
        place = self._places[sequence, stage]
        residual = None if place.residual is None else self._file.read(place.residual)
        return Reading(self._file.read(place.inputs), place.slots, place.tokens, residual)
