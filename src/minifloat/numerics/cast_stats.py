"""Error statistics of a cast as sums, so that those of several tensors can be added; no torch, no numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CastStats:
    """Error of a cast as sums over elements; ``CastStats()`` is the zero of the sum."""

    elements: int = 0
    signal: float = 0.0  #: sum of ``w**2``
    noise: float = 0.0  #: sum of ``(w - dequantized)**2``
    saturated: int = 0  #: clamped to the largest value by more than a rounding error
    flushed: int = 0  #: not zero, and zero afterwards

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio, ``10 log10(signal / noise)`` in dB; inf if there is no noise."""
        if self.noise == 0.0:
            return math.inf
        if self.signal == 0.0:
            return -math.inf
        return 10.0 * (math.log10(self.signal) - math.log10(self.noise))

    @property
    def saturated_fraction(self) -> float:
        return self.saturated / max(self.elements, 1)

    @property
    def flushed_fraction(self) -> float:
        """Fraction of the elements that were flushed to zero, 0..1; 0 for an empty tensor."""
        return self.flushed / max(self.elements, 1)

    def __add__(self, other: CastStats) -> CastStats:
        """Return the statistics of both parts together."""
        return CastStats(
            self.elements + other.elements,
            self.signal + other.signal,
            self.noise + other.noise,
            self.saturated + other.saturated,
            self.flushed + other.flushed,
        )
