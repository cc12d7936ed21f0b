"""`observe` by the native library (``csrc/observe``, and the amax of ``csrc/quantize``), in the calling thread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from minifloat.kernels import native
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.native.structs import STRUCTS


def observe(x: Tensor, histogram: npt.NDArray[np.int64] | None) -> tuple[float, int]:
    """Implement `minifloat.kernels.observe.observe`; `x` is not empty."""
    library = native.require()
    data, count, dtype = x.data_ptr(), x.numel(), DTYPES[x.dtype]
    args = STRUCTS["amax_args"](data=data, count=count, dtype=dtype)
    library.call("amax", args)
    if histogram is not None:
        library.call(
            "histogram", STRUCTS["histogram_args"](data=data, count=count, dtype=dtype, bins=histogram.ctypes.data)
        )
    return args.amax, args.nonfinite
