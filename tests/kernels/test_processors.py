"""The processors of a process: control groups of both versions, OpenMP's spin time, and its runtimes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minifloat.errors import UsageError
from minifloat.kernels import processors
from minifloat.kernels.processors import TeamOptions


def membership(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cgroup"
    path.write_text(text)
    return path


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_smallest_quota_of_a_version_2_group_and_its_parents_applies(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    group(root / "a" / "b", cpu__max="max 100000\n")
    group(root / "a", cpu__max="150000 100000\n")
    assert processors.cgroup_quota(membership(tmp_path, "0::/a/b\n"), root) == 1.5
    group(root / "a" / "b", cpu__max="50000 100000\n")
    assert processors.cgroup_quota(membership(tmp_path, "0::/a/b\n"), root) == 0.5


def test_a_quota_of_version_1_is_read(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    group(root / "cpu,cpuacct" / "box", cpu__cfs_quota_us="300000\n", cpu__cfs_period_us="100000\n")
    group(root / "cpu,cpuacct", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    lines = "9:memory:/box\n4:cpu,cpuacct:/box\n0::/\n"
    assert processors.cgroup_quota(membership(tmp_path, lines), root) == 3.0


def test_a_group_that_a_container_cannot_see_is_skipped(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    group(root, cpu__max="200000 100000\n")
    assert processors.cgroup_quota(membership(tmp_path, "0::/not/mounted/here\n"), root) == 2.0


@pytest.mark.parametrize("text", ["max 100000\n", "", "nonsense\n", "100000 0\n"])
def test_without_a_limit_the_quota_is_none(tmp_path: Path, text: str) -> None:
    group(tmp_path / "fs", cpu__max=text)
    assert processors.cgroup_quota(membership(tmp_path, "0::/\n"), tmp_path / "fs") is None
    assert processors.cgroup_quota(tmp_path / "missing", tmp_path / "fs") is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (1.5, 2), (0.1, 1), (99.0, 8)])
def test_the_limit_is_the_smaller_of_processors_and_quota_rounded_up(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr(processors, "cgroup_quota", lambda: quota)
    monkeypatch.setattr(processors, "available", lambda: 8)
    assert processors.limit.__wrapped__() == expected


def test_the_command_line_limits_the_spin_unless_the_environment_does() -> None:
    code = "import os; from minifloat.kernels.processors import bound_spin; bound_spin(); print(os.environ.get({!r}))"

    def spin(**environment: str) -> str:
        kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        command = [sys.executable, "-c", code.format("GOMP_SPINCOUNT")]
        return subprocess.run(
            command, env=kept | environment, check=True, capture_output=True, text=True
        ).stdout.strip()

    assert spin() == str(processors.SPIN_COUNT)
    assert spin(GOMP_SPINCOUNT="7") == "7"
    assert spin(OMP_WAIT_POLICY="active") == "None"


def test_openmp_runtimes_are_distinguished_from_other_libraries(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    lines = ["7f00-7f01 r-xp 00000000 08:01 11 /a b/libgomp.so.1", "7f01-7f02 r--p 00000000 08:01 11 /a b/libgomp.so.1"]
    lines += [
        "7f02-7f03 r-xp 0 08:01 12 /usr/lib/libiomp5.so",
        "7f03-7f04 rw-p 0 00:00 0",
        "7f04-7f05 r-xp 0 0 0 /x/libc.so",
    ]
    maps.write_text("\n".join(lines))
    assert processors.openmp_runtimes(maps) == ("/a b/libgomp.so.1", "/usr/lib/libiomp5.so")
    assert processors.openmp_runtimes(tmp_path / "missing") == ()


@pytest.mark.parametrize("binding", [{"GOMP_CPU_AFFINITY": "0-1"}, {"OMP_PROC_BIND": "true", "OMP_PLACES": "{0},{1}"}])
def test_the_limit_is_not_that_of_the_one_processor_that_openmp_binds_the_first_thread_to(
    binding: dict[str, str],
) -> None:
    """vLLM starts its workers with such a binding."""
    if not {0, 1} <= os.sched_getaffinity(0) or processors.limit() < 2:
        pytest.skip("needs processors 0 and 1")
    code = (
        "import os, torch\nfrom minifloat.kernels import processors\nprint(processors.available(), processors.limit())"
    )
    environment = os.environ | binding | {"OMP_NUM_THREADS": "2"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["1", "2"]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a system of two nodes with 4 processors each, of which this process may not use the last."""
    for node, listed in {"node0": "0-1,8-9", "node1": "2-3,10-11", "node2": ""}.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(f"{listed}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(11)), raising=False)
    return tmp_path


def test_numa_nodes_are_the_processors_that_this_process_may_use(nodes: Path) -> None:
    first, second = frozenset({0, 1, 8, 9}), frozenset({2, 3, 10})
    assert processors.numa_nodes("all", nodes) == [first, second]
    assert processors.numa_nodes("1", nodes) == [second]
    assert processors.numa_nodes("1, 0", nodes) == [second, first]


@pytest.mark.parametrize("asked", ["2", "0,0", "x", "", "0-1"])
def test_other_numa_nodes_are_refused_with_those_that_there_are(nodes: Path, asked: str) -> None:
    with pytest.raises(UsageError, match="some of the nodes 0, 1"):
        processors.numa_nodes(asked, nodes)


def test_numa_is_refused_where_the_system_lists_no_nodes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no NUMA nodes"):
        processors.numa_nodes("all", tmp_path)


def test_a_team_has_at_most_the_threads_that_its_nodes_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "limit", lambda: 8)
    monkeypatch.setattr(processors, "numa_nodes", lambda asked: [frozenset({0, 1, 2})])
    counts = [TeamOptions(threads=threads, numa=numa).count for threads in (None, 2, 20) for numa in (None, "0")]
    assert counts == [8, 3, 2, 2, 8, 3]
