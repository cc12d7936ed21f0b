"""How many threads a call of the kernels uses.

They are the threads of OpenMP that torch computes with, so there is one number for both: `torch.set_num_threads`,
``OMP_NUM_THREADS`` (which torch reads) and `set_threads` all set it. It is capped by what the process may use, which
torch does not look at: in a container with two processors' worth of time on a machine with 64, torch starts 64 threads,
and most of them wait for their turn while the others wait for them.

Any number of Python threads may call at once; each has a team of threads of its own, so give each a share. After a fork
the threads of the parent are gone: a child of a process that had started them computes with one thread (use spawn to
have more).

A program that uses this package as a library on a machine that is busy with other work should call
`minifloat.kernels.processors.bound_spin` before anything imports torch, as the command line does; that module says why.
"""

from __future__ import annotations

import torch

from minifloat.errors import UsageError
from minifloat.kernels import native
from minifloat.kernels.processors import limit

__all__ = ["count", "limit", "release", "set_threads"]


def count() -> int:
    """Threads of the next call: as many as torch uses, at most `limit`."""
    return min(torch.get_num_threads(), limit())


def set_threads(threads: int) -> None:
    """Compute with that many threads from now on, torch's own ops included.

    Args:
        threads: How many; the kernels use no more than `limit`.

    Raises:
        UsageError: Fewer than one.
    """
    if threads < 1:
        raise UsageError(f"at least one thread is needed, got {threads}")
    torch.set_num_threads(threads)


def release() -> None:
    """End the threads that compute for the calling thread, torch's included; they come back when it needs them.

    For a thread that has computed (a model was loaded in it) and leaves that to another one from now on. GNU OpenMP
    counts the threads of all teams, and when they are more than processors those of every team sleep where they would
    wait awake: a decoding step of a 1.1B model took 12% longer, one of a 4M model 2.4 times as long.
    """
    library = native.load()
    if library is not None:
        library.release_threads()
