"""The options of tuning."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TuneOptions:
    """How codes and norms are tuned.

    Attributes:
        steps: Updates of the weights.
        batch: Sequences per step.
        rate: Largest change of a weight per step, in mean steps between the values that its codes stand for. For E2M1
            the mean step is about two thirds of the scale.
        norm_rate: Largest change of an element of a norm per step, as a fraction of the norm's root mean square.
        every: Steps between two measurements on held-out text.
        seed: Of the order of the sequences.
    """

    steps: int = 100
    batch: int = 8
    rate: float = 0.003
    norm_rate: float = 0.001
    every: int = 25
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        return asdict(self)


DEFAULT_TUNING = TuneOptions()
