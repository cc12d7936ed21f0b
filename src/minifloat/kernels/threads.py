"""The number of threads that a call of the kernels uses."""

from __future__ import annotations

import torch

from minifloat.errors import UsageError
from minifloat.kernels import native
from minifloat.kernels.processors import TeamOptions, limit, numa_nodes, stay_on

# Kernels and torch compute with the same OpenMP threads. A quota of control groups bounds ours; torch ignores it. A
# forked child of a process that had started threads computes with one.

__all__ = ["count", "limit", "release", "set_threads", "set_up"]


def count() -> int:
    """Return the number of threads of the next call: that of torch, at most `limit`."""
    return min(torch.get_num_threads(), limit())


def set_threads(threads: int) -> None:
    if threads < 1:
        raise UsageError(f"at least one thread is needed, got {threads}")
    torch.set_num_threads(threads)


def set_up(team: TeamOptions) -> None:
    """Compute with these threads from now on; of several nodes, each gets as many of the threads as the others."""
    # One node needs no binding of single threads: the system runs them there, and gives them its memory.
    nodes = [] if team.numa is None else numa_nodes(team.numa)
    if nodes:
        stay_on(frozenset().union(*nodes))
    if team.threads is not None:
        set_threads(team.threads)
    library = native.load()
    if library is not None and len(nodes) > 1:
        library.bind_threads(nodes, count())


def release() -> None:
    """End the OpenMP threads of the calling thread, torch's included; its next call starts them again."""
    # With more threads than processors, those of every team sleep: a step of a 4M model took 2.4 times as long.
    library = native.load()
    if library is not None:
        library.release_threads()
