"""What a process may compute with: processors, their share by control groups, and the OpenMP runtimes it has loaded.

Imports no torch, so that the command line can tell OpenMP how long to spin before torch loads it.

A thread of OpenMP that has nothing to do, and one that waits for the others at the end of a product, spins for a while
before it sleeps: to be woken up costs 90 us. By default GNU's runtime spins for more than ten milliseconds, which takes
a processor from the very thread that is waited for when another process is busy. `bound_spin` sets less. Measured with
products of 0.16 ms on two cores, mean time of a call:

    rounds        alone, pauses of 0 to 100 us / 300 us / 1 ms      beside a process that never sleeps
    default       0.17 / 0.18 / 0.21 ms                             1.2 to 2.9 ms, 2% of the calls over 8 ms
    30000         0.17 to 0.20 / 0.18 / 0.27 ms                     0.8 to 1.0 ms, 2% over 1.5 to 3.3 ms
    10000         0.18 to 0.19 / 0.26 / 0.28 ms                     0.5 to 0.7 ms, 2% over 0.8 to 1.5 ms
    1000          0.24 / 0.24 / 0.25 ms                             0.4 to 0.5 ms, 2% over 0.5 to 5.1 ms

Left out: LLVM's and Intel's runtimes, which have a setting of their own (KMP_BLOCKTIME).
"""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

from minifloat.errors import UsageError

#: Rounds that a waiting thread spins, about 25 ns each: longer than the pause between the products of a layer.
SPIN_COUNT = 10000

_MOST_WORKERS = 8
_SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_MAPS = Path("/proc/self/maps")


def bound_spin() -> None:
    """Bound the spin of GNU's OpenMP, unless the environment says something about it already.

    The runtime reads it when it is loaded, with torch: later calls change nothing.
    """
    if not any(name in os.environ for name in _SPIN_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def workers(wanted: int | None) -> int:
    """Threads to stream a checkpoint with: as many as are wanted, by default one per processor that is free, at most 8.

    Raises:
        UsageError: Fewer than 1.
    """
    if wanted is not None and wanted < 1:
        raise UsageError(f"workers is at least 1, got {wanted}")
    return min(available(), _MOST_WORKERS) if wanted is None else wanted


@cache
def limit() -> int:
    """Threads that this process can run at the same time, found out once: never less than 1.

    The processors that it may be scheduled on (affinity), or fewer where control groups allow less of their time: a
    quota of 1.5 processors is 2 threads.
    """
    quota = cgroup_quota()
    processors = available()
    return processors if quota is None else max(1, min(processors, math.ceil(quota)))


def available() -> int:
    """Processors that this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_quota(membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS) -> float | None:
    """The processors' worth of time that control groups, of version 1 or 2, leave to this process.

    Args:
        membership: The file that says which groups it is in.
        cgroups: Where their file system is mounted.

    Returns:
        The least of its group and all above it, None without a limit. A group that is not to be seen from inside a
        container is passed over.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            roots = [cgroups]
        elif "cpu" in controllers.split(","):
            roots = [cgroups / controllers, cgroups / "cpu"]
        else:
            continue
        path = Path(group.lstrip("/"))
        quotas += [_quota(root / above) for root in roots for above in (path, *path.parents)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    """The limit of one group: ``cpu.max`` in version 2, two files in version 1."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def openmp_runtimes(maps: Path = _MAPS) -> tuple[str, ...]:
    """Paths of the OpenMP runtimes that this process has loaded; empty where that cannot be seen.

    Args:
        maps: What it has mapped into memory, as Linux lists it.
    """
    try:
        fields = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
    except OSError:
        return ()
    files = {line[5] for line in fields if len(line) > 5}
    return tuple(sorted(file for file in files if Path(file).name.startswith(("libgomp", "libomp", "libiomp"))))
