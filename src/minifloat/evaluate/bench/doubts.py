"""Reasons why the figures of a run of `bench` are not to be quoted: a busy machine, unlike rounds, impossible figures.

A gain above the ratio of the bytes that a step reads comes from something other than the format: a slower baseline, or
caches. More than all of the bandwidth means that the bytes came from caches, or that the probe was disturbed.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from minifloat.evaluate.bench.figures import BatchFigures, StepBytes, spread
from minifloat.evaluate.bench.workload import Workload

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


def _ticks(process: int) -> int:
    """Return the CPU time of a process and of its ended children, in clock ticks."""
    stat = Path(f"/proc/{process}/stat")
    fields = stat.read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))


#: Largest share of the time of all cores that other processes, or a hypervisor, may take.
_OTHERS, _STOLEN = 0.05, 0.02
#: Largest difference between rounds, over their median.
_SPREAD = 0.15
#: Measured ratios and shares may exceed their limit by this factor, the noise of a quiet machine.
_NOISE = 1.05
_FEWEST_ROUNDS = 2


@dataclass(frozen=True)
class Side:
    """One of the two engines."""

    read: StepBytes
    batches: Mapping[int, BatchFigures]
    drafts: bool = False


def find_doubts(load: Workload, use: MachineUse | None, baseline: Side, candidate: Side) -> tuple[str, ...]:
    """Return a sentence for each reason not to quote the figures of a run; none if there is no reason."""
    found = list(_of_machine(load, use))
    for batch in load.batch_sizes:
        found += (f"Batch {batch}: {doubt}" for doubt in _of_batch(load, batch, baseline, candidate))
    return tuple(found)


def _of_machine(load: Workload, use: MachineUse | None) -> Iterator[str]:
    if use is not None and use.others > _OTHERS:
        yield f"Other processes used {use.others:.0%} of the machine."
    if use is not None and use.stolen > _STOLEN:
        yield f"The hypervisor gave {use.stolen:.0%} of the machine's time to others (steal)."
    if load.rounds < _FEWEST_ROUNDS:
        yield "One round has no spread: nothing tells how much of a gain is chance (--rounds 3)."


def _of_batch(load: Workload, batch: int, baseline: Side, candidate: Side) -> Iterator[str]:
    sides = {"baseline": baseline, "candidate": candidate}
    before, after = (side.batches[batch].decode_ms for side in sides.values())
    gains = [slow / fast for slow, fast in zip(before, after, strict=True)] if before and after else []
    spreads = {"baseline": spread(before), "candidate": spread(after), "gain": spread(gains)}
    wide = [f"{name} {value:.0%}" for name, value in spreads.items() if value is not None and value > _SPREAD]
    if wide:
        yield f"decode steps of different rounds differ by more than {_SPREAD:.0%}: {', '.join(wide)}."
    ratio = baseline.read.of_step(load, batch) / candidate.read.of_step(load, batch)
    if gains and not candidate.drafts and statistics.median(gains) > max(ratio, 1.0) * _NOISE:
        yield (
            f"a gain of {statistics.median(gains):.2f}x is more than the {ratio:.2f}x fewer bytes of a step explain: "
            "caches, or a baseline that is slower than it could be."
        )
    for name, side in sides.items():
        share = side.batches[batch].bandwidth_share
        if share is not None and share > _NOISE and not side.drafts:
            yield (
                f"the {name} reads at {share:.0%} of the measured bandwidth: its bytes come from caches, or other work "
                "slowed the measurement of the bandwidth."
            )
