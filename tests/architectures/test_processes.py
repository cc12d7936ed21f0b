"""Rows run in forked processes, in which several threads use PyTorch at once."""

from __future__ import annotations

import multiprocessing
import threading

import torch
from row import _renew_thread_pool

_THREADS, _PROCESSES = 4, 40
_LIMIT = 30  # seconds of a process
_ELEMENTS = 200_000  # more than PyTorch computes without its threads


def _add_in_threads(renew: bool) -> None:
    if renew:
        _renew_thread_pool()
    x = torch.zeros(_ELEMENTS)
    barrier, failures = threading.Barrier(_THREADS), []

    def add() -> None:
        barrier.wait()
        try:
            x.add(1)
        except RuntimeError as error:
            failures.append(error)

    threads = [threading.Thread(target=add) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raise SystemExit(1 if failures else 0)


def _failures(renew: bool) -> int:
    context = multiprocessing.get_context("fork")
    count = 0
    for _ in range(_PROCESSES):
        process = context.Process(target=_add_in_threads, args=(renew,))
        process.start()
        process.join(_LIMIT)
        count += process.exitcode != 0
        process.kill()
    return count


def test_threads_of_a_forked_process_find_a_thread_pool() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the parent of the rows
    try:
        assert _failures(renew=True) == 0
    finally:
        torch.set_num_threads(before)
