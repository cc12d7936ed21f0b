"""Measures how fast this machine reads memory and multiplies BF16 matrices, as the kernels do."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minifloat.errors import KernelUnavailable, UsageError
from minifloat.kernels import native, processors
from minifloat.kernels.native import CONSTANTS, STRUCTS

_WORD = np.dtype(np.uint64)


@dataclass(frozen=True)
class ReadBandwidth:
    bytes: int  #: size of the buffer
    threads: int
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """The difference of the fastest and the slowest pass, divided by the median."""
        return (max(self.samples) - min(self.samples)) / self.median


def read_bandwidth(size: int, threads: int, rounds: int = 9) -> ReadBandwidth:
    """Measure the read bandwidth of memory: read a buffer several times, after one pass that warms up."""
    if size < _WORD.itemsize or threads < 1 or rounds < 1:
        raise UsageError(f"cannot read {size} bytes with {threads} threads in {rounds} rounds")
    library = native.load()
    if library is None:
        raise KernelUnavailable(f"read_bandwidth: {native.why_unavailable()}")
    size -= size % _WORD.itemsize
    words = np.frombuffer(_pages(size), _WORD, size // _WORD.itemsize)
    words.fill(1)  # unwritten pages all map to the same physical page
    args = STRUCTS["read_args"](data=words.ctypes.data, bytes=size, threads=threads)
    samples = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        library.call("read", args)
        samples.append(size / (time.perf_counter() - start))
        assert args.sum == len(words), "the probe did not read what it claims to have read"
    return ReadBandwidth(size, threads, tuple(samples[1:]))


def gpu_read_bandwidth(device: Any, size: int, rounds: int = 9) -> ReadBandwidth:
    """Measure the read bandwidth of a GPU's memory: torch adds up a buffer several times."""
    import torch

    event: Any = torch.cuda.Event
    words = torch.ones(size // torch.float32.itemsize, device=device)
    samples = []
    with torch.cuda.device(device):
        for _ in range(rounds + 1):
            start, end = event(enable_timing=True), event(enable_timing=True)
            start.record()
            words.sum()
            end.record()
            end.synchronize()
            samples.append(words.nbytes * 1e3 / start.elapsed_time(end))
    return ReadBandwidth(words.nbytes, 1, tuple(samples[1:]))


def _pages(size: int) -> mmap.mmap:
    """Map new memory, in 2 MB pages if the system has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets small pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


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
