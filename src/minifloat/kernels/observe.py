"""Measures a tensor for calibration: its amax, and optionally a histogram of its magnitudes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minifloat.errors import UnsupportedTensorError
from minifloat.kernels import native
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.native import STRUCTS
from minifloat.numerics.histogram import BINS, count_magnitudes

#: Minimum elements per thread: a few hundred microseconds of work, for which waking a thread pays off.
_SHARE_AMAX = 1 << 20
_SHARE_HISTOGRAM = 1 << 18


def observe(
    x: Tensor, histogram: npt.NDArray[np.int64] | None = None, *, impl: str = "auto", threads: int | None = None
) -> tuple[float, int]:
    """Measure a tensor."""
    _check(x, histogram)
    runs_native = native.runs("observe", impl)
    if x.numel() == 0:
        return 0.0, 0
    if not runs_native:
        return _observe_in_torch(x, histogram)
    flat = x.detach().view(-1)
    share = _SHARE_AMAX if histogram is None else _SHARE_HISTOGRAM
    parts = min(threads or torch.get_num_threads(), max(flat.numel() // share, 1))
    if parts == 1:
        return _observe_native(flat, histogram)
    return _observe_parts(flat.tensor_split(parts), histogram)


def _observe_parts(parts: Sequence[Tensor], histogram: npt.NDArray[np.int64] | None) -> tuple[float, int]:
    """Measure the first part in this thread and each of the others in a thread of the pool."""
    counts = [None if histogram is None else np.zeros_like(histogram) for _ in parts]
    running: list[Future[tuple[float, int]]] = [
        _pool(os.getpid()).submit(_observe_native, part, count)
        for part, count in zip(parts[1:], counts[1:], strict=True)
    ]
    results = [_observe_native(parts[0], counts[0]), *(future.result() for future in running)]
    for count in counts:
        if histogram is not None and count is not None:
            histogram += count
    return max(amax for amax, _ in results), sum(nonfinite for _, nonfinite in results)


@cache
def _pool(_process: int) -> ThreadPoolExecutor:
    """Return the thread pool of this process; a forked process creates its own."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="minifloat-observe")


def _check(x: Tensor, histogram: npt.NDArray[np.int64] | None) -> None:
    if x.dtype not in DTYPES or x.device.type != "cpu" or not x.is_contiguous():
        raise UnsupportedTensorError(
            "x", f"expected a contiguous 16- or 32-bit float tensor on the CPU, got {x.dtype} on {x.device}"
        )
    if histogram is None:
        return
    if histogram.shape != (BINS,) or histogram.dtype != np.int64 or not histogram.flags.c_contiguous:
        raise ValueError(f"histogram must be contiguous int64 [{BINS}], got {histogram.dtype} {histogram.shape}")


def _observe_native(x: Tensor, histogram: npt.NDArray[np.int64] | None) -> tuple[float, int]:
    """Measure `x`, which is not empty, in the calling thread."""
    library = native.require()
    data, count, dtype = x.data_ptr(), x.numel(), DTYPES[x.dtype]
    args = STRUCTS["amax_args"](data=data, count=count, dtype=dtype)
    library.call("amax", args)
    if histogram is not None:
        library.call(
            "histogram", STRUCTS["histogram_args"](data=data, count=count, dtype=dtype, bins=histogram.ctypes.data)
        )
    return args.amax, args.nonfinite


def _observe_in_torch(x: Tensor, histogram: npt.NDArray[np.int64] | None) -> tuple[float, int]:
    """The reference of the native library; `x` is not empty."""
    if histogram is not None:
        histogram += count_magnitudes(x.detach().float().numpy())
    # Over the last dimension first: torch's reduction of everything at once is many times slower in 16 bits.
    amax = float(x.abs().amax(-1).amax())
    if np.isfinite(amax):
        return amax, 0
    finite = x.isfinite()
    return float(x.where(finite, 0.0).abs().amax()), int(x.numel() - finite.sum())
