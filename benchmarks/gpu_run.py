"""Settings, log, time budget and timer of a run of `benchmarks/gpu.py`.

Every result is one line of JSON in ``gpu.jsonl``, written as soon as it is measured. A dry run executes the same code
on the CPU with tiny sizes; each of its lines says that it is not a measurement.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from timing import spread

#: Marks every line and the report of a dry run.
DRY_RUN = "dry run, not a measurement"


@dataclass
class Run:
    """The settings and the state of one run.

    Attributes:
        out: The folder of the results.
        minutes: Time limit of all sections together.
        dry: Whether this is a dry run: tiny sizes on the CPU.
        started: Start of the run on the monotonic clock, in seconds.
        until: Deadline of the current section on the monotonic clock, in seconds.
        facts: Limits of the device that later sections need: ``read_gbps``, ``peak_tflops``.
    """

    out: Path
    minutes: float
    dry: bool
    started: float = field(default_factory=time.monotonic)
    until: float = math.inf
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device that is measured."""
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def left(self) -> float:
        """Seconds left for the current section."""
        return min(self.started + self.minutes * 60, self.until) - time.monotonic()

    def share(self, name: str, of: float) -> float | None:
        """Return `of` divided by the fact `name`; None if that fact was not measured."""
        return of / self.facts[name] if name in self.facts else None

    def log(self, section: str, **values: Any) -> None:
        """Append one result to ``gpu.jsonl`` and print it."""
        line = {"section": section, **values} | ({"dry_run": DRY_RUN} if self.dry else {})
        with (self.out / "gpu.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = " ".join(
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
        )
        click.echo(f"[{time.monotonic() - self.started:5.0f} s] {section}: {shown}"[:220])

    @contextmanager
    def attempt(self, section: str, what: str) -> Iterator[None]:
        """Log an exception of the block as a result, so that the report lists it, and continue."""
        try:
            yield
        except Exception as error:  # failures of peers, drivers and untested kernels are results here
            self.log(section, what=what, failed=f"{type(error).__name__}: {error}".split("\n")[0][:300])


@dataclass(frozen=True)
class Timing:
    """The time of one call.

    Attributes:
        seconds: Median of the samples.
        spread: Interquartile range over the median.
        samples: Number of samples.
    """

    seconds: float
    spread: float
    samples: int


def timing_of(samples: Sequence[float]) -> Timing:
    """Return the statistics of samples in seconds."""
    return Timing(statistics.median(samples), spread(samples), len(samples))


def clock(run: Run, calls: Sequence[Callable[[], object]], samples: int = 20, seconds: float = 0.05) -> Timing:
    """Return the time of one of `calls`, which do the same work, each in memory of its own.

    On CUDA all calls are captured in one graph, so that launches cost what they cost in a served decode step. The graph
    is replayed until there are enough samples and enough time has passed. Calls that cannot be captured raise.

    Args:
        run: The run, whose device is used.
        calls: The calls; together they access more memory than the caches hold.
        samples: Smallest number of samples.
        seconds: Smallest total time of the samples.
    """
    if run.device.type == "cpu":
        return timing_of([_seconds(calls) / len(calls) for _ in range(3)])
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    with torch.cuda.stream(stream):
        for call in (calls[0], *calls):  # warm up: compile, allocate, let libraries choose their kernels
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    first = replay(graph)
    count = max(samples, math.ceil(seconds / first))
    return timing_of([replay(graph) / len(calls) for _ in range(count)])


def replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def _seconds(calls: Sequence[Callable[[], object]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start
