"""How fast this machine multiplies BF16 matrices, measured in a tenth of a second without torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from minifloat.kernels import native, processors
from minifloat.kernels.native.structs import CONSTANTS, STRUCTS

_ROWS, _COLUMNS = 1024, 1024
#: The fastest of so many products counts: the first one starts threads and touches the memory.
_REPEATS = 5
#: The bits of 1.0 in bfloat16.
_ONE = 0x3F80


def measure_product_rate(threads: int | None = None) -> float:
    """Return operations per second of a product ``[1024, 1024]' x [1024, 1024]``, all threads together."""
    product = _native_product(threads or _threads()) or _numpy_product()
    best = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - started)
    return 2.0 * _ROWS * _COLUMNS * _COLUMNS / best


def _native_product(threads: int) -> Callable[[], object] | None:
    """Return a product of the native library; None: there is no library."""
    library = native.load()
    if library is None:
        return None
    x, y = (np.full((_ROWS, _COLUMNS), _ONE, np.uint16) for _ in range(2))
    out = np.zeros((_COLUMNS, _COLUMNS), np.float32)
    args = STRUCTS["gram_args"](
        x=x.ctypes.data,
        y=y.ctypes.data,
        out=out.ctypes.data,
        rows=_ROWS,
        x_cols=_COLUMNS,
        y_cols=_COLUMNS,
        x_stride=_COLUMNS,
        y_stride=_COLUMNS,
        dtype=CONSTANTS["BF16"],
        symmetric=False,
        threads=threads,
    )
    arrays = (x, y, out)

    def product() -> object:
        library.call("gram", args)
        return arrays  # `args` holds their addresses only

    return product


def _numpy_product() -> Callable[[], object]:
    x, y = (np.ones((_ROWS, _COLUMNS), np.float32) for _ in range(2))
    return lambda: x.T @ y


def _threads() -> int:
    """Return the threads that torch would use: one per processor, or fewer by ``OMP_NUM_THREADS``."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(processors.limit(), int(wanted) if wanted.isdigit() and int(wanted) else processors.limit())
