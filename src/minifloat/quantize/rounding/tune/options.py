"""The options of tuning."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TuneOptions:
    """How codes and norms are tuned."""

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
