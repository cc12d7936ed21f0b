"""What a run of `benchmarks/gpu.py` shares: settings, the log that loses nothing, time left, and the clock of a device.

Every finding is a JSON object on a line of its own in ``gpu.jsonl``, written as it is found. A dry run goes through the
same code on the CPU with tiny sizes; every line of it says that it is no measurement.
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

#: What lines of a dry run carry, and the report too.
DRY_RUN = "dry run, not a measurement"


@dataclass
class Run:
    """One run.

    Attributes:
        out: Where results go.
        minutes: For everything.
        dry: Whether sizes are tiny and the device is the CPU.
        started: When, on the monotonic clock.
        until: When the section at work has to stop.
        facts: What later sections need of earlier ones: ``read_gbps``, ``peak_tflops``.
    """

    out: Path
    minutes: float
    dry: bool
    started: float = field(default_factory=time.monotonic)
    until: float = math.inf
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where everything is measured."""
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def left(self) -> float:
        """Seconds left for the section at work."""
        return min(self.started + self.minutes * 60, self.until) - time.monotonic()

    def share(self, name: str, of: float) -> float | None:
        """`of` over a fact, where that was measured."""
        return of / self.facts[name] if name in self.facts else None

    def log(self, section: str, **values: Any) -> None:
        """Write a finding, at once."""
        line = {"section": section, **values} | ({"dry_run": DRY_RUN} if self.dry else {})
        with (self.out / "gpu.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = " ".join(
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
        )
        click.echo(f"[{time.monotonic() - self.started:5.0f} s] {section}: {shown}"[:220])

    @contextmanager
    def attempt(self, section: str, what: str) -> Iterator[None]:
        """Go on after a failure, which becomes a finding; what is not measured must be seen."""
        try:
            yield
        except Exception as error:  # of a peer, a driver, a kernel that has never run: all are results here
            self.log(section, what=what, failed=f"{type(error).__name__}: {error}".split("\n")[0][:300])


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of the samples, and the distance between their quartiles over it."""

    seconds: float
    spread: float
    samples: int


def timing_of(samples: Sequence[float]) -> Timing:
    """The statistics of samples."""
    median = statistics.median(samples)
    if len(samples) < 4:
        return Timing(median, (max(samples) - min(samples)) / median, len(samples))
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, (high - low) / median, len(samples))


def clock(run: Run, calls: Sequence[Callable[[], object]], samples: int = 20, seconds: float = 0.05) -> Timing:
    """The time of one of `calls`, which do the same to memory of their own each.

    On CUDA all calls are one graph, so that launches cost what they cost in a served decode step; it is replayed until
    there are `samples`, for `seconds` at least. Calls that cannot be captured raise.

    Args:
        run: Its device is used.
        calls: Together they touch more memory than the caches hold.
        samples: At least.
        seconds: At least.
    """
    if run.device.type == "cpu":
        return timing_of([_seconds(calls) / len(calls) for _ in range(3)])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in (calls[0], *calls):  # compiles, allocates, and lets libraries choose
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    once = _replay(graph)
    count = max(samples, math.ceil(seconds / once))
    return timing_of([_replay(graph) / len(calls) for _ in range(count)])


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _seconds(calls: Sequence[Callable[[], object]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start
