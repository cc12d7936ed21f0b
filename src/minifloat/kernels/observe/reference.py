"""`observe` in plain torch and numpy: the fallback without the native library, and its reference in tests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from minifloat.numerics.histogram import count_magnitudes


def observe(x: Tensor, histogram: npt.NDArray[np.int64] | None) -> tuple[float, int]:
    """Implement `minifloat.kernels.observe.observe`; `x` is not empty."""
    if histogram is not None:
        histogram += count_magnitudes(x.detach().float().numpy())
    # Over the last dimension first: torch's reduction of everything at once is many times slower in 16 bits.
    amax = float(x.abs().amax(-1).amax())
    if np.isfinite(amax):
        return amax, 0
    finite = x.isfinite()
    return float(x.where(finite, 0.0).abs().amax()), int(x.numel() - finite.sum())
