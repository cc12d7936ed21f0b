"""Memory that is prepared early: where it goes, and that what is left over goes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minifloat.kernels import prepared_memory
from minifloat.kernels.pack.memory import allocate, is_aligned
from minifloat.kernels.prepared_memory import HUGE_PAGE

SIZE = 4 * HUGE_PAGE


@pytest.fixture(autouse=True)
def one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "nodes").write_text("0\n")
    monkeypatch.setattr(prepared_memory, "_NODES", tmp_path / "nodes")
    yield
    prepared_memory.finish()


def test_allocations_come_from_prepared_memory_until_it_ends() -> None:
    assert prepared_memory.prepare(SIZE)
    assert not prepared_memory.prepare(SIZE)
    first, second = allocate(HUGE_PAGE + 5), allocate(HUGE_PAGE)
    assert second.data_ptr() - first.data_ptr() == HUGE_PAGE + 4096
    assert is_aligned(first)
    assert is_aligned(second)
    large = allocate(SIZE)  # does not fit
    assert not first.data_ptr() <= large.data_ptr() < first.data_ptr() + SIZE
    for tensor, value in ((first, 1), (second, 2), (large, 3)):
        tensor.fill_(value)
    prepared_memory.finish()
    assert prepared_memory.take(HUGE_PAGE) is None
    assert [int(tensor.unique()) for tensor in (first, second, large)] == [1, 2, 3]
    assert len(first) == HUGE_PAGE + 5


def test_small_allocations_do_not_use_prepared_memory() -> None:
    assert prepared_memory.prepare(SIZE)
    before = allocate(HUGE_PAGE).data_ptr()
    small = allocate(1000)
    assert not before <= small.data_ptr() < before + SIZE


def test_what_is_left_over_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    size = 32 * HUGE_PAGE
    torch.zeros(1)
    before = resident()
    assert prepared_memory.prepare(size)
    region = prepared_memory._region
    assert region is not None
    region._thread.join()
    if resident() - before < size // 2:
        pytest.skip("this system does not touch memory on request")
    taken = allocate(HUGE_PAGE)
    prepared_memory.finish()
    assert resident() - before < 4 * HUGE_PAGE
    assert len(taken) == HUGE_PAGE


@pytest.mark.parametrize(("nodes", "reason"), [("0-1\n", "several NUMA nodes"), (None, "does not say")])
def test_memory_is_not_prepared_where_that_would_harm(nodes: str | None, reason: str, tmp_path: Path) -> None:
    (tmp_path / "nodes").unlink()
    if nodes is not None:
        (tmp_path / "nodes").write_text(nodes)
    assert reason in prepared_memory.why_not(SIZE)
    assert not prepared_memory.prepare(SIZE)


def test_memory_is_not_prepared_where_little_is_free() -> None:
    assert "little memory is free" in prepared_memory.why_not(1 << 50)
