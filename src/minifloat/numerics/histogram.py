"""Histograms of magnitudes: bins of an eighth of an octave, and the numpy reference that others must equal."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from minifloat.numerics.formats import BFLOAT16, FLOAT32

Floats: TypeAlias = npt.NDArray[np.float32]
Counts: TypeAlias = npt.NDArray[np.int64]

MANTISSA_BITS = 3  #: number of leading mantissa bits that, with the exponent, select the bin
BINS_PER_OCTAVE = 1 << MANTISSA_BITS
BINS = BINS_PER_OCTAVE << BFLOAT16.exponent_bits
#: Number of bins for finite numbers; the bins from this index on (the all-ones exponent) stay empty.
FINITE_BINS = BINS - BINS_PER_OCTAVE


def bin_edges() -> npt.NDArray[np.float64]:
    """Return the borders of the bins, float64 ``[BINS + 1]``; bin 0 holds zeros and values below ``edges[1]``."""
    index = np.arange(BINS + 1)
    exponent, mantissa = index >> MANTISSA_BITS, index & (BINS_PER_OCTAVE - 1)
    significand = mantissa + np.where(exponent > 0, BINS_PER_OCTAVE, 0)
    edges: npt.NDArray[np.float64] = np.ldexp(
        significand.astype(np.float64), np.maximum(exponent, 1) - BFLOAT16.bias - MANTISSA_BITS
    )
    return edges


def octaves(counts: Counts) -> list[tuple[float, float]]:
    """Return the smallest magnitude of each octave of finite normal numbers, and its share of all that was counted."""
    edges, total = bin_edges(), int(counts.sum())
    starts = range(BINS_PER_OCTAVE, FINITE_BINS, BINS_PER_OCTAVE)
    return [(float(edges[start]), int(counts[start : start + BINS_PER_OCTAVE].sum()) / total) for start in starts]


def count_magnitudes(values: Floats) -> Counts:
    """Return the histogram of ``|values|``, int64 ``[BINS]``; the reference of every other implementation."""
    bits = np.ascontiguousarray(values).view(np.uint32).ravel()
    magnitude = bits & ((1 << (FLOAT32.bits - 1)) - 1)
    return np.bincount(magnitude >> (FLOAT32.mantissa_bits - MANTISSA_BITS), minlength=BINS).astype(np.int64)
