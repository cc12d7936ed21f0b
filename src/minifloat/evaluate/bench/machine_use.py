"""How busy a machine is with other work while something is measured, from Linux' counters of CPU time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if _STAT.exists() else 1


@dataclass(frozen=True)
class CpuTime:
    """CPU time since the machine started, in seconds summed over its cores."""

    total: float
    busy: float
    stolen: float
    own: float

    @classmethod
    def now(cls, processes: Iterable[int]) -> CpuTime | None:
        """Read the counters; None where the system has none."""
        if not _STAT.exists():
            return None
        user, nice, system, idle, waiting, interrupts, soft, stolen = map(int, _STAT.read_text().split()[1:9])
        busy = user + nice + system + interrupts + soft
        own = sum(map(_ticks, {os.getpid(), *processes}))
        ticks = (busy + idle + waiting + stolen, busy, stolen, own)
        return cls(*(count / _TICKS_PER_SECOND for count in ticks))


@dataclass(frozen=True)
class MachineUse:
    """What else used the machine, as shares of the time of all its cores."""

    others: float
    stolen: float

    @classmethod
    def between(cls, before: CpuTime | None, after: CpuTime | None) -> MachineUse | None:
        """Return the use between two readings; None without readings."""
        if before is None or after is None or after.total <= before.total:
            return None
        total = after.total - before.total
        others = (after.busy - before.busy) - (after.own - before.own)
        return cls(max(0.0, others / total), (after.stolen - before.stolen) / total)


def peak_rss(process: int) -> int:
    """Return the largest resident memory of a process so far, in bytes; 0 where the system does not say."""
    status = Path(f"/proc/{process}/status")
    if not status.exists():
        return 0
    lines = (line.split() for line in status.read_text().splitlines())
    return next((int(words[1]) << 10 for words in lines if words[0] == "VmHWM:"), 0)


def rss(process: int) -> int:
    """Return the resident memory of a process, in bytes; 0 where the system does not say."""
    status = Path(f"/proc/{process}/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def _ticks(process: int) -> int:
    """Return the CPU time of a process and of its ended children, in clock ticks."""
    stat = Path(f"/proc/{process}/stat")
    fields = stat.read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))
