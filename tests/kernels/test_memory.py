"""Available memory, the least that the system and the control groups of both versions leave; memory touched ahead."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from minifloat.calibration import own_text
from minifloat.deploy.diagnosis.machine import examine_machine
from minifloat.deploy.estimate.hardware import _this_machine
from minifloat.engine import cache, drafters
from minifloat.engine.options import EngineOptions
from minifloat.errors import UsageError
from minifloat.evaluate.bench import gains
from minifloat.kernels import memory
from minifloat.kernels.pack import Arena, pack

MIB = 1 << 20


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a tree of control groups, in which the process is in a/b (memory of version 1: in box)."""
    (tmp_path / "membership").write_text("9:memory:/box\n0::/a/b\n")
    root, read = tmp_path / "fs", memory._groups
    root.mkdir()
    monkeypatch.setattr(memory, "_groups", lambda: read(tmp_path / "membership", root))
    return root


def test_without_limits_the_system_decides(groups: Path) -> None:
    write(groups / "a" / "b", memory__max="max", memory__high="max", memory__current=5 * MIB)
    write(groups / "memory" / "box", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=MIB)
    assert memory.memory_limit() is None
    assert memory.total_memory() == psutil.virtual_memory().total
    assert memory.available_memory() > 100 * MIB


def test_a_version_2_group_leaves_its_limit_less_its_use(groups: Path) -> None:
    write(groups / "a" / "b", memory__max=100 * MIB, memory__high="max", memory__current=30 * MIB)
    assert memory.memory_limit() == memory.total_memory() == 100 * MIB
    assert memory.available_memory() == 70 * MIB


def test_the_smallest_of_nested_groups_decides(groups: Path) -> None:
    """A parent with the larger limit can leave less: other groups in it take memory too."""
    write(groups / "a" / "b", memory__max=100 * MIB, memory__current=30 * MIB)
    write(groups / "a", memory__max=200 * MIB, memory__current=180 * MIB)
    assert (memory.memory_limit(), memory.available_memory()) == (100 * MIB, 20 * MIB)
    write(groups / "a", memory__max=50 * MIB, memory__current=80 * MIB)
    assert (memory.memory_limit(), memory.available_memory()) == (50 * MIB, 0)


def test_high_counts_as_a_limit(groups: Path) -> None:
    write(groups / "a" / "b", memory__max="max", memory__high=64 * MIB, memory__current=4 * MIB)
    assert memory.available_memory() == 60 * MIB


def test_files_in_memory_are_available(groups: Path) -> None:
    stat = f"anon {10 * MIB}\nactive_file {20 * MIB}\ninactive_file {40 * MIB}\nshmem 0"
    write(groups / "a" / "b", memory__max=100 * MIB, memory__current=75 * MIB, memory__stat=stat)
    assert memory.available_memory() == 85 * MIB


def test_a_version_1_group_is_read(groups: Path) -> None:
    stat = f"active_file 0\ntotal_active_file {MIB}\ntotal_inactive_file {2 * MIB}"
    write(groups / "memory" / "box", memory__limit_in_bytes=50 * MIB, memory__usage_in_bytes=9 * MIB, memory__stat=stat)
    assert (memory.memory_limit(), memory.available_memory()) == (50 * MIB, 44 * MIB)


def test_a_group_that_a_container_cannot_see_is_that_of_its_root(groups: Path) -> None:
    write(groups / "memory", memory__limit_in_bytes=50 * MIB, memory__usage_in_bytes=10 * MIB)
    assert memory.available_memory() == 40 * MIB


def test_unreadable_numbers_are_no_limits(groups: Path) -> None:
    write(groups / "a" / "b", memory__max="nonsense", memory__current="", memory__stat="x y\n\nz")
    assert memory.memory_limit() is None


def test_everything_that_asks_for_memory_obeys_control_groups(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(groups / "a" / "b", memory__max=64 * MIB, memory__current=24 * MIB)
    config = SimpleNamespace(max_position_embeddings=1 << 20)
    config.get_text_config = lambda **_: config
    size: Any = cache.cache_size(EngineOptions(), config, 1 << 10, torch.device("cpu"))
    assert size.blocks * size.bytes_per_block <= 40 * MIB * cache._KV_SHARE
    with pytest.raises(UsageError, match=r"kv_cache_memory: 50.00 MiB were asked for, and 40.00 MiB are free"):
        cache.cache_size(EngineOptions(kv_cache_memory=50 * MIB), config, 1 << 10, torch.device("cpu"))
    with pytest.raises(UsageError, match=r"takes 41 MiB, and 40 MiB are free"):
        drafters._check_memory(41 * MIB, "the draft")
    assert _this_machine(1e9, 1e12).memory == 64 * MIB
    machine = examine_machine()
    assert (machine.memory_free, machine.memory_limit) == (40 * MIB, 64 * MIB)
    for module in (own_text, gains):
        assert module.available_memory is memory.available_memory


def touched_all(nbytes: int) -> memory.Touched:
    touched = memory.Touched(nbytes)
    touched._thread.join()
    return touched


def test_touched_memory_is_taken_once_and_stays_when_the_rest_is_given_back() -> None:
    touched = touched_all(64 * MIB)
    parts = [touched.take(10 * MIB + 1), touched.take(MIB)]
    assert [part and part[1] for part in parts] == [0, 10 * MIB + mmap.PAGESIZE]
    assert touched.take(60 * MIB) is None
    region = touched._region
    region[: 12 * MIB] = b"7" * (12 * MIB)
    touched.end()
    assert touched.take(1) is None
    assert region[: 10 * MIB] == b"7" * (10 * MIB)
    if hasattr(mmap, "MADV_DONTNEED"):
        assert region[11 * MIB + mmap.PAGESIZE : 12 * MIB] == bytes(MIB - mmap.PAGESIZE)


def test_memory_that_is_not_touched_yet_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.Touched, "_touch", lambda self: None)
    assert memory.Touched(MIB).take(1) is None


@pytest.mark.parametrize(("free", "found"), [(100 * MIB, 10 * MIB), (10 * MIB, 5 * MIB), (0, None)])
def test_half_of_the_available_memory_is_touched_at_most_and_within_the_context_only(
    free: int, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: free)
    with memory.touching(10 * MIB):
        touched = memory._touched
        assert (touched and len(touched._region)) == found
        if touched is not None:
            touched._thread.join()
            assert memory.take_touched(MIB) is not None
    assert memory.take_touched(MIB) is None


def test_weights_are_packed_into_touched_memory() -> None:
    weight = torch.randn(70, 96).to(torch.bfloat16)
    with memory.touching(MIB):
        assert memory._touched is not None
        memory._touched._thread.join()
        region = memory._touched._region
        packed = pack(weight, arena=Arena())
    assert packed.data.data_ptr() == torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    assert torch.equal(packed.dequantize(torch.bfloat16), weight)
