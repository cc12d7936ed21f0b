"""The number of threads that a call of the kernels uses.

Kernels and torch compute with the same OpenMP threads, so there is one number for both: `torch.set_num_threads`,
``OMP_NUM_THREADS`` (which torch reads) and `set_threads` all set it. Kernels respect the quota of the process, which
torch ignores: in a container with a quota of two processors on a machine with 64, torch starts 64 threads that wait for
each other.

Any number of Python threads may call kernels at the same time; each has its own team of threads, so give each a share.
After a fork the threads of the parent are gone: a child of a process that had started them computes with one thread
(use spawn to have more).

A program that uses this package as a library on a busy machine should call `minifloat.kernels.processors.bound_spin`
before anything imports torch, as the command line does: otherwise waiting threads spin for more than ten milliseconds.
"""

from __future__ import annotations

import torch

from minifloat.errors import UsageError
from minifloat.kernels import native
from minifloat.kernels.processors import limit

__all__ = ["count", "limit", "release", "set_threads"]


def count() -> int:
    """Return the number of threads of the next call: that of torch, at most `limit`."""
    return min(torch.get_num_threads(), limit())


def set_threads(threads: int) -> None:
    """Set the number of threads of kernels and of torch's own ops."""
    if threads < 1:
        raise UsageError(f"at least one thread is needed, got {threads}")
    torch.set_num_threads(threads)


def release() -> None:
    """End the OpenMP threads of the calling thread, torch's included; its next call starts them again.

    For a thread that has loaded a model and leaves computing to another thread. GNU OpenMP counts the threads of all
    teams; if there are more threads than processors, the threads of every team sleep instead of spinning: a decoding
    step of a 1.1B model took 12% longer, one of a 4M model 2.4 times as long.
    """
    library = native.load()
    if library is not None:
        library.release_threads()
