"""The kernels' threads: their number, their release, and the nodes that they run on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minifloat.errors import UsageError
from minifloat.kernels import native, threads
from minifloat.kernels.linear import linear
from minifloat.kernels.pack import pack
from minifloat.kernels.processors import limit

native_only = pytest.mark.skipif(native.load() is None, reason=native.why_unavailable())


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_number_of_threads_is_that_of_torch_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "limit", lambda: 3)
    for asked, expected in ((1, 1), (3, 3), (7, 3)):
        threads.set_threads(asked)
        assert torch.get_num_threads() == asked
        assert threads.count() == expected
    with pytest.raises(UsageError, match="at least one"):
        threads.set_threads(0)


@native_only
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux lists them")
def test_releasing_ends_the_threads_and_the_next_call_starts_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "limit", lambda: 4)
    threads.set_threads(4)
    weight, x = pack(torch.randn(512, 512).to(torch.bfloat16)), torch.randn(3, 512).to(torch.bfloat16)

    def running() -> set[str]:
        return {path.name for path in Path("/proc/self/task").iterdir()}

    def release() -> None:
        """Release the threads, and wait until the system no longer lists those that `linear` started."""
        threads.release()
        deadline = time.monotonic() + 60
        while running() & started and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not running() & started

    started: set[str] = set()
    linear(x, weight)  # torch's own threads start here, and those of an earlier test may be among ours
    release()
    before = running()
    expected = linear(x, weight)
    started = running() - before
    assert len(started) == 3
    release()
    before = running()
    assert torch.equal(linear(x, weight), expected)
    assert len(running() - before) == 3


#: Computes with two threads on two "nodes" of a processor each, and prints where each thread of the team may run.
_ON_NODES = """
import os, sys
from pathlib import Path
from minifloat.kernels import processors, threads
first, second = sorted(os.sched_getaffinity(0))[:2]
threads.numa_nodes = lambda asked: [frozenset({first}), frozenset({second})]
import torch
from minifloat.kernels.linear import linear
from minifloat.kernels.pack import pack
weight, x = pack(torch.randn(512, 512).bfloat16()), torch.randn(3, 512).bfloat16()
before = linear(x, weight)
threads.set_up(processors.TeamOptions(threads=2, numa="all"))
assert torch.equal(linear(x, pack(weight.unpack())), before)
texts = [(task / "status").read_text() for task in Path("/proc/self/task").iterdir()]
allowed = [text.split("Cpus_allowed_list:")[1].split()[0] for text in texts]
print({str(first), str(second)} <= set(allowed), threads.count())
"""


@native_only
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads where threads may run as Linux lists it")
@pytest.mark.skipif(limit() < 2, reason="one processor")
def test_the_threads_of_a_team_stay_on_their_nodes() -> None:
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", _ON_NODES]
    assert subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout == "True 2\n"
