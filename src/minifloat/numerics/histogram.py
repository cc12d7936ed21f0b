"""Histograms of magnitudes: how a value chooses its bin, and the count that every implementation must agree with.

A bin is the exponent and the first three mantissa bits of a float, so that a bin spans an eighth of an octave and the
count is exact and the same on every device, for BF16, FP16 and FP32 alike.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from minifloat.numerics.formats import BFLOAT16, FLOAT32

Floats: TypeAlias = npt.NDArray[np.float32]
Counts: TypeAlias = npt.NDArray[np.int64]

MANTISSA_BITS = 3  #: of a magnitude, that choose its bin, below all of its exponent
BINS_PER_OCTAVE = 1 << MANTISSA_BITS
BINS = BINS_PER_OCTAVE << BFLOAT16.exponent_bits
#: Bins below this one hold finite numbers; those from it on (the all-ones exponent) stay empty.
FINITE_BINS = BINS - BINS_PER_OCTAVE


def bin_edges() -> npt.NDArray[np.float64]:
    """The borders of the bins, float64 `[BINS + 1]`: bin `i` holds the magnitudes in `[edges[i], edges[i + 1])`.

    Bin 0 holds zeros and the subnormals below `edges[1]`, which count as zeros.
    """
    index = np.arange(BINS + 1)
    exponent, mantissa = index >> MANTISSA_BITS, index & (BINS_PER_OCTAVE - 1)
    significand = mantissa + np.where(exponent > 0, BINS_PER_OCTAVE, 0)
    edges: npt.NDArray[np.float64] = np.ldexp(
        significand.astype(np.float64), np.maximum(exponent, 1) - BFLOAT16.bias - MANTISSA_BITS
    )
    return edges


def count_magnitudes(values: Floats) -> Counts:
    """The histogram of `|values|`, int64 `[BINS]`: what every implementation must agree with.

    Args:
        values: float32 of any shape.
    """
    bits = np.ascontiguousarray(values).view(np.uint32).ravel()
    magnitude = bits & ((1 << (FLOAT32.bits - 1)) - 1)
    return np.bincount(magnitude >> (FLOAT32.mantissa_bits - MANTISSA_BITS), minlength=BINS).astype(np.int64)
