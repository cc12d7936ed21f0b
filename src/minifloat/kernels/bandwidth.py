"""How fast this machine reads memory: the limit that kernels for few tokens are measured against.

A product with one token reads every weight once and does little else, so its time cannot be below the bytes of the
weights over this bandwidth. It is measured as the kernels read: same threads, 2 MB pages where the system gives them,
prefetched by software. It leaves out caches (the buffer has to be far larger than the last of them, or the figure is
theirs) and writes.
"""

from __future__ import annotations

import mmap
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from minifloat.errors import KernelUnavailable, UsageError
from minifloat.kernels import native
from minifloat.kernels.native import structs

_WORD = np.dtype(np.uint64)


@dataclass(frozen=True)
class ReadBandwidth:
    """What was measured.

    Attributes:
        bytes: Size of the buffer.
        threads: Threads that read it together.
        samples: Bytes per second of every pass.
    """

    bytes: int
    threads: int
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Bytes per second."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Fastest less slowest pass, over the median."""
        return (max(self.samples) - min(self.samples)) / self.median


def read_bandwidth(size: int, threads: int, rounds: int = 9) -> ReadBandwidth:
    """Read a buffer from its first byte to its last, several times; one pass more warms up and is not counted.

    Args:
        size: Bytes of the buffer; at least 1 GB says something about memory. Rounded down to whole 64-bit words.
        threads: Threads that share it.
        rounds: Passes that count.

    Raises:
        KernelUnavailable: There is no native library.
        UsageError: A size below one word, or a count below 1.
    """
    if size < _WORD.itemsize or threads < 1 or rounds < 1:
        raise UsageError(f"cannot read {size} bytes with {threads} threads in {rounds} rounds")
    library = native.load()
    if library is None:
        raise KernelUnavailable(f"read_bandwidth: {native.why_unavailable()}")
    size -= size % _WORD.itemsize
    words = np.frombuffer(_pages(size), _WORD, size // _WORD.itemsize)
    words.fill(1)  # pages that were never written are all the same one
    args = structs.ReadArgs(data=words.ctypes.data, bytes=size, threads=threads)
    samples = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        library.read(args)
        samples.append(size / (time.perf_counter() - start))
        assert args.sum == len(words), "the probe did not read what it claims to have read"
    return ReadBandwidth(size, threads, tuple(samples[1:]))


def gpu_read_bandwidth(device: Any, size: int, rounds: int = 9) -> ReadBandwidth:
    """The same of a GPU's memory: torch adds up a buffer, several times.

    Args:
        device: torch's CUDA device.
        size: Bytes of the buffer; far more than its caches hold.
        rounds: Passes that count.
    """
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
    """Memory of its own, in 2 MB pages where the system has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets small ones
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
