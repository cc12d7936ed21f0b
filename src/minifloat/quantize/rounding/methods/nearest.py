"""Rounding to nearest: each element takes the code closest to it, whatever the inputs are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minifloat.quantize.rounding.grid import Grid
from minifloat.quantize.rounding.methods.protocol import Inputs, Rounded


class Nearest:
    """Rounding to nearest."""

    name = "nearest"
    summary = "each weight to its nearest code; needs no data"
    needs_data = False
    follows_quantized = False
    trains = False

    def round(self, weights: Sequence[Tensor], grids: Sequence[Grid], inputs: Inputs) -> Rounded:
        """Return the nearest codes."""
        return Rounded([grid.nearest_codes() for grid in grids])
