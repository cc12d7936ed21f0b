"""The global divisor of NVFP4 as one float32 number, without torch.

`minifloat.numerics.scale_rules.global_divisor`, the reference, computes the same number as a torch tensor; a test
requires the same bits from both.
"""

from __future__ import annotations

import numpy as np

from minifloat.numerics.formats import E2M1, E4M3, FLOAT32


def scalar_global_divisor(tensor_amax: float) -> np.float32:
    """Return the float32 by which NVFP4 divides the block scales of a tensor, a power of two.

    It is the largest power of two that is at most ``E4M3.max * E2M1.max / amax``, so that the largest block scale is
    between half of E4M3's largest value and that value. Its reciprocal is a power of two as well. Layouts that store
    the reciprocal (ModelOpt) therefore hold the same weights, bit for bit, and decoding rounds once less.

    The quotient is computed as the float32 reciprocal of amax times the constant, as compressed-tensors computes it;
    that divisor is at most twice as large.

    Args:
        tensor_amax: amax of the tensor, or of all tensors that share the divisor; rounded to float32.

    Returns:
        The divisor; 1.0 if the quotient is not finite (amax zero, below 8e-36, or NaN).
    """
    with np.errstate(over="ignore"):
        clamped = np.maximum(np.float32(tensor_amax), np.float32(FLOAT32.min_normal))
        quotient = np.float32(1.0) / clamped * np.float32(E4M3.max * E2M1.max)
    if not np.isfinite(quotient):
        return np.float32(1.0)
    return np.float32(np.ldexp(0.5, int(np.frexp(quotient)[1])))
