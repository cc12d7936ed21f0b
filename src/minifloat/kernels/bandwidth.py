"""Measures how fast this machine reads memory, the limit of kernels for few tokens."""

from __future__ import annotations

import mmap
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from minifloat.errors import KernelUnavailable, UsageError
from minifloat.kernels import native
from minifloat.kernels.native.structs import STRUCTS

_WORD = np.dtype(np.uint64)


@dataclass(frozen=True)
class ReadBandwidth:
    """A measured read bandwidth."""

    bytes: int  #: size of the buffer
    threads: int
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, in bytes per second."""
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
