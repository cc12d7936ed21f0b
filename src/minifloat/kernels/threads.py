"""How many threads a call of the kernels uses."""

from __future__ import annotations

import os
from functools import cache

import torch

from minifloat.errors import UsageError


def count() -> int:
    """Threads of the next call: as many as torch uses, at most `limit`."""
    return min(torch.get_num_threads(), limit())


def set_threads(threads: int) -> None:
    """Compute with that many threads from now on, torch's own ops included.

    Raises:
        UsageError: Fewer than one.
    """
    if threads < 1:
        raise UsageError(f"at least one thread is needed, got {threads}")
    torch.set_num_threads(threads)


@cache
def limit() -> int:
    """Threads that can run at the same time."""
    return len(os.sched_getaffinity(0))
