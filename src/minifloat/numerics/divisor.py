"""The global divisor of NVFP4 as one float32 number, without torch.

`minifloat.numerics.scale_rules.global_divisor`, the reference, computes the same number as a torch tensor; a test
requires the same bits from both.
"""

from __future__ import annotations

import numpy as np

from minifloat.numerics.formats import E2M1, E4M3, FLOAT32


def scalar_global_divisor(tensor_amax: float) -> np.float32:
    """Return the float32 by which NVFP4 divides the block scales of a tensor, ``E4M3.max * E2M1.max / amax``.

    The quotient is computed as the float32 reciprocal of amax times the constant (two roundings): compressed-tensors
    computes it so and files must agree to the bit.

    Args:
        tensor_amax: amax of the tensor, or of all tensors that share the divisor; rounded to float32.

    Returns:
        The divisor; 1.0 if the quotient is not finite (amax zero, below 8e-36, or NaN).
    """
    with np.errstate(over="ignore"):
        clamped = np.maximum(np.float32(tensor_amax), np.float32(FLOAT32.min_normal))
        quotient = np.float32(1.0) / clamped * np.float32(E4M3.max * E2M1.max)
    return np.float32(quotient) if np.isfinite(quotient) else np.float32(1.0)
