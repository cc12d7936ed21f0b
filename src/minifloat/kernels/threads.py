"""The number of threads that a call of the kernels uses."""

from __future__ import annotations

import torch

from minifloat.errors import UsageError
from minifloat.kernels import native
from minifloat.kernels.processors import limit

# Kernels and torch compute with the same OpenMP threads. A quota of control groups bounds ours; torch ignores it. A
# forked child of a process that had started threads computes with one.

__all__ = ["count", "limit", "release", "set_threads"]


def count() -> int:
    """Return the number of threads of the next call: that of torch, at most `limit`."""
    return min(torch.get_num_threads(), limit())


def set_threads(threads: int) -> None:
    if threads < 1:
        raise UsageError(f"at least one thread is needed, got {threads}")
    torch.set_num_threads(threads)


def release() -> None:
    """End the OpenMP threads of the calling thread, torch's included; its next call starts them again."""
    # With more threads than processors, those of every team sleep: a step of a 4M model took 2.4 times as long.
    library = native.load()
    if library is not None:
        library.release_threads()
