"""The global divisor of NVFP4 as one float32 number, without torch."""

from __future__ import annotations

import numpy as np

from minifloat.numerics.formats import E2M1, E4M3, FLOAT32


def scalar_global_divisor(tensor_amax: float) -> np.float32:
    """Return the largest power of two that is at most ``E4M3.max * E2M1.max / amax``; 1.0 if that is not finite."""
    # a power of two, so that layouts that store the reciprocal (ModelOpt) hold the same weights; the quotient is
    # that of compressed-tensors' `generate_gparam`
    with np.errstate(over="ignore"):
        clamped = np.maximum(np.float32(tensor_amax), np.float32(FLOAT32.min_normal))
        quotient = np.float32(1.0) / clamped * np.float32(E4M3.max * E2M1.max)
    if not np.isfinite(quotient):
        return np.float32(1.0)
    return np.float32(np.ldexp(0.5, int(np.frexp(quotient)[1])))
