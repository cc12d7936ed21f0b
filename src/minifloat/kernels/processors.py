"""Processors that a process may use, its quota in control groups, and the OpenMP runtimes it has loaded."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from minifloat.errors import UsageError
from minifloat.numerics.ranges import Count

# Waking a thread costs 90 us, so idle ones spin; by default GNU's runtime spins for over ten milliseconds and then
# takes the processor from the very thread it waits for: beside a busy process a call of 0.16 ms took 1.2 to 2.9 ms, and
# with this number 0.5 to 0.7 ms. Runtimes of LLVM and Intel have a setting of their own (KMP_BLOCKTIME).
#: Rounds that a waiting thread spins, about 25 ns each: longer than the pause between the products of a layer.
SPIN_COUNT = 10000

_MOST_WORKERS = 8
_SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_BIND_VARIABLES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
#: Where Linux shows control groups, and those of this process.
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_MAPS = Path("/proc/self/maps")
#: Where Linux shows the NUMA nodes, as node0 and so on.
NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, kw_only=True)
class TeamOptions:
    """The threads that an engine on a CPU computes with.

    Attributes:
        threads: Threads to compute with; None: torch's.
        numa: NUMA nodes to compute on, as 0 or 0,1 or all: the threads stay on their processors, and memory is theirs;
            None: wherever the system runs them.
    """

    threads: Count | None = None
    numa: str | None = None

    @property
    def count(self) -> int:
        """The number of threads, or the most that can run."""
        most = limit() if self.numa is None else min(limit(), sum(map(len, numa_nodes(self.numa))))
        return most if self.threads is None else min(self.threads, most)


def bound_spin() -> None:
    """Limit how long GNU's OpenMP spins, unless the environment sets it already."""
    if not any(name in os.environ for name in _SPIN_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def workers(requested: int | None) -> int:
    """Return the number of threads that stream a checkpoint: `requested`, by default one per processor, at most 8."""
    if requested is not None and requested < 1:
        raise UsageError(f"workers is at least 1, got {requested}")
    return min(available(), _MOST_WORKERS) if requested is None else requested


@cache
def limit() -> int:
    """Return how many threads this process can run at the same time, at least 1."""
    quota = cgroup_quota()
    processors = max(available(), openmp_processors())
    return processors if quota is None else max(1, min(processors, math.ceil(quota)))


def available() -> int:
    """Return the number of processors that this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def numa_nodes(asked: str, folder: Path = NODES) -> list[frozenset[int]]:
    """Return the processors of NUMA nodes that this process may use; `asked`: numbers with commas between, or all."""
    known = {int(path.name[4:]): _listed((path / "cpulist").read_text()) for path in folder.glob("node[0-9]*")}
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    nodes = {node: processors & usable for node, processors in sorted(known.items()) if processors & usable}
    if not nodes:
        raise UsageError("numa: this system lists no NUMA nodes, or lets no process choose its processors")
    if asked == "all":
        return list(nodes.values())
    numbers = [int(number) if number.strip().isdecimal() else -1 for number in asked.split(",")]
    if len(set(numbers)) < len(numbers) or not nodes.keys() >= set(numbers):
        raise UsageError(f"numa: expected all, or some of the nodes {', '.join(map(str, nodes))}, got {asked!r}")
    return [nodes[number] for number in numbers]


def _listed(text: str) -> frozenset[int]:
    """Return the processors of a list such as "0-3,8"."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return frozenset(number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1))


def stay_on(processors: frozenset[int]) -> None:
    """Let this thread, and threads that it starts from now on, run on these processors only."""
    os.sched_setaffinity(0, processors)
    limit.cache_clear()


def openmp_processors() -> int:
    """Return the number of processors that a loaded OpenMP runtime binds its threads to; 0 if it binds none."""
    if not any(name in os.environ for name in _BIND_VARIABLES):
        return 0
    runtimes = [ctypes.CDLL(path) for path in openmp_runtimes()]
    return max((int(runtime.omp_get_num_procs()) for runtime in runtimes), default=0)


def cgroup_quota(membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS) -> float | None:
    """Return the CPU quota that control groups, of version 1 or 2, give this process, in processors."""
    quotas = map(_quota, control_groups("cpu", membership, cgroups))
    return min((quota for quota in quotas if quota is not None), default=None)


def control_groups(controller: str, membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS) -> Iterator[Path]:
    """Yield the folders of this process's control groups of a controller, and of the groups above them.

    In version 2 every controller has the same groups. Folders that a container cannot see do not exist; the group of
    the container itself is then the root.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            roots = [cgroups]
        elif controller in controllers.split(","):
            roots = [cgroups / controllers, cgroups / controller]
        else:
            continue
        path = Path(group.lstrip("/"))
        yield from (root / above for root in roots for above in (path, *path.parents))


def _quota(group: Path) -> float | None:
    """Return the quota of one group, from ``cpu.max`` in version 2 or from two files in version 1."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def openmp_runtimes(maps: Path = _MAPS) -> tuple[str, ...]:
    """Return the paths of the OpenMP runtimes that this process has loaded; empty if the system does not list them."""
    try:
        fields = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
    except OSError:
        return ()
    files = {line[5] for line in fields if len(line) > 5}
    return tuple(sorted(file for file in files if Path(file).name.startswith(("libgomp", "libomp", "libiomp"))))
