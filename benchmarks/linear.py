"""Measure our linears against torch's and other libraries', the required speeds and the memory bandwidth.

    python benchmarks/linear.py --json linear.json              # the full table
    python benchmarks/linear.py --isa avx2                      # kernels and torch both held to AVX2
    python benchmarks/linear.py --overhead                      # the cost of a call

Every contender owns weights of 1 GB or more, so that they are read from memory. One round takes a sample of each; times
are medians over the rounds. "x torch" is the median over the rounds of the speed relative to torch BF16 `F.linear` in
the same round. "read%" is the median of the bandwidth relative to that at which the same threads read memory. This
bandwidth and torch BF16 at M = 1 are also measured before and after all cases, to show the drift of the machine.
"peak%" is the rate relative to torch BF16's best rate here, on a square product that fits into the caches.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import instruction_sets
import linear_shapes

from minifloat.errors import MinifloatError
from minifloat.kernels.speed import ReadBandwidth, read_bandwidth

# Modules that import torch come after force(), because torch reads its instruction set limits when it is imported.
ALL_M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
#: Up to this many rows, reading the weights is the limit, so that the share of the read bandwidth is meaningful.
MEMORY_BOUND = 64
#: Side of the square weight that tracks the machine's drift, and of the square product of the peak rate.
STATE_SIDE = 4096
PEAK_SIDE = 2048
PEAK_SECONDS = 0.5
#: ``(N, K)`` and number of calls of `overhead`.
TINY = (32, 64)
TINY_CALLS = 5000


@dataclass(frozen=True)
class Settings:
    """The parsed options of the command line: what to measure, and for how long."""

    shapes: dict[str, tuple[int, int]]
    ms: tuple[int, ...]
    formats: tuple[str, ...]
    peers: tuple[str, ...]
    nbytes: int
    rounds: int
    seconds: float
    threads: int


@dataclass
class Reference:
    """Read bandwidth and speed of torch on this machine, measured at the start and again at the end."""

    bandwidth: ReadBandwidth
    torch_seconds: list[float]

    def describe(self) -> str:
        """Return both in one line."""
        from timing import spread

        return (
            f"read bandwidth {self.bandwidth.median / 1e9:.1f} GB/s (+-{self.bandwidth.spread * 50:.0f}% over "
            f"{len(self.bandwidth.samples)} passes of {self.bandwidth.bytes / 1e9:.1f} GB); "
            f"torch BF16 {STATE_SIDE}x{STATE_SIDE}, M=1: {statistics.median(self.torch_seconds) * 1e6:.0f} us "
            f"(+-{spread(self.torch_seconds) * 50:.0f}%)"
        )


def reference(settings: Settings) -> Reference:
    """Measure the read bandwidth and the time of torch BF16 at M = 1."""
    from linear_contenders import contenders
    from timing import measure

    size = max(settings.nbytes, 1)
    bandwidth = read_bandwidth(size, settings.threads, settings.rounds)
    baseline = contenders((STATE_SIDE, STATE_SIDE), (), (), size)
    return Reference(bandwidth, measure(baseline, 1, STATE_SIDE, settings.rounds, 1.0)[linear_shapes.BASELINE])


def peak_gflops() -> float:
    """Return the best rate of torch BF16 on a large product, in GFLOP/s."""
    import torch

    a, b = (torch.randn(PEAK_SIDE, PEAK_SIDE).to(torch.bfloat16) for _ in range(2))
    best, until = math.inf, time.perf_counter() + PEAK_SECONDS
    while math.isinf(best) or time.perf_counter() < until:
        start = time.perf_counter()
        torch.nn.functional.linear(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * PEAK_SIDE**3 / best / 1e9


def table(settings: Settings, out: dict[str, Any]) -> None:
    """Measure and print every case; add the cases with all their samples to `out`."""
    from linear_contenders import contenders, memory_read
    from linear_report import HEADER, Case, line, record, rows_of
    from timing import measure

    peak = out["torch_peak_gflops"] = peak_gflops()
    click.echo(f"torch BF16 peak, {PEAK_SIDE}^3: {peak:.0f} GFLOP/s")
    cases: list[dict[str, object]] = []
    reading = memory_read(settings.nbytes, settings.threads)
    out["cases"] = cases
    for name, (n, k) in settings.shapes.items():
        compared = contenders((n, k), settings.formats, settings.peers, settings.nbytes)
        least = min(len(contender.weights) for contender in compared)
        click.echo(f"\n{name}: N={n} K={k}, at least {least} weights of each contender\n{HEADER}")
        for m in settings.ms:
            present = [reading, *compared] if m <= MEMORY_BOUND else compared
            samples = measure(present, m, k, settings.rounds, settings.seconds)
            case = Case(name, (n, k), m, {c.name: c.nbytes for c in present}, samples)
            rows = rows_of(case)
            for row in rows:
                click.echo(line(m, row, peak))
            click.echo()
            cases.append(record(case, rows))
        del compared


def run(settings: Settings) -> dict[str, Any]:
    """Run the selected measurements and return the record for JSON."""
    import torch
    from linear_contenders import missing

    facts = instruction_sets.machine(settings.threads)
    out: dict[str, Any] = {"machine": facts, "rounds": settings.rounds, "gigabytes": settings.nbytes / 1e9}
    with torch.inference_mode():
        before = reference(settings)
        click.echo(f"before: {before.describe()}")
        for peer in missing(settings.peers):
            click.echo(f"{peer}: not installed")
        table(settings, out)
        after = reference(settings)
    drift = {
        "read_bandwidth": after.bandwidth.median / before.bandwidth.median - 1,
        "torch_bf16": statistics.median(after.torch_seconds) / statistics.median(before.torch_seconds) - 1,
    }
    click.echo(f"\nafter:  {after.describe()}")
    click.echo(f"drift:  bandwidth {drift['read_bandwidth']:+.1%}, time of torch BF16 {drift['torch_bf16']:+.1%}")
    for name, measured in (("before", before), ("after", after)):
        out[name] = {"read_bandwidth": measured.bandwidth.samples, "torch_bf16_seconds": measured.torch_seconds}
    out["drift"] = drift
    return out


def overhead(rounds: int) -> dict[str, float]:
    """Print and return the microseconds of a call with a weight so small that only the call itself takes time."""
    import torch
    from linear_contenders import source
    from torch.nn import functional

    from minifloat.kernels.linear import linear
    from minifloat.kernels.pack import pack

    weight, x = source("bf16", TINY), torch.randn(1, TINY[1]).to(torch.bfloat16)
    assert isinstance(weight, torch.Tensor)
    packed = pack(source("fp8", TINY))
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "F.linear": lambda: functional.linear(x, weight),
        "linear, fp8": lambda: linear(x, packed),
    }
    best = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(TINY_CALLS):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / TINY_CALLS * 1e6)
    click.echo("; ".join(f"{name} {us:.1f} us per call, {TINY[0]}x{TINY[1]}" for name, us in best.items()))
    return best


@click.command(help=__doc__.split("\n")[0])
@click.option("--shapes", default=linear_shapes.DEFAULT, show_default=True, help="model, model/layer, NxK, all; commas")
@click.option("--m", "ms", default=",".join(map(str, ALL_M)), show_default=True, help="Rows of the input.")
@click.option("--formats", default="all", show_default=True, help=", ".join(linear_shapes.FORMATS))
@click.option("--peers", default="all", show_default=True, help="Names separated by commas, all, or none.")
@click.option("--gigabytes", default=1.0, show_default=True, help="Size of each contender's weights.")
@click.option("--rounds", default=7, show_default=True, help="Number of samples of each contender and case.")
@click.option("--seconds", default=0.1, show_default=True, help="Approximate time of a sample.")
@click.option("--threads", default=0, help="Threads of torch and the kernels.  [default: torch's]")
@click.option("--isa", help="Limit the kernels and torch to this instruction set.")
@click.option("--overhead", "only_overhead", is_flag=True, help="Only measure a call on a tiny weight.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for all results and samples.")
def main(shapes: str, ms: str, isa: str | None, only_overhead: bool, json_path: Path | None, **options: Any) -> None:
    """Measure linears."""
    instruction_sets.force(isa)
    import torch
    from linear_contenders import PEERS

    settings = Settings(
        shapes=linear_shapes.parse_shapes(shapes),
        ms=tuple(int(m) for m in ms.split(",")),
        formats=linear_shapes.parse_names(options["formats"], linear_shapes.FORMATS, "formats"),
        peers=linear_shapes.parse_names(options["peers"], PEERS, "peers"),
        nbytes=int(options["gigabytes"] * 1e9),
        rounds=options["rounds"],
        seconds=options["seconds"],
        threads=options["threads"] or min(torch.get_num_threads(), len(os.sched_getaffinity(0))),
    )
    torch.set_num_threads(settings.threads)
    click.echo(instruction_sets.describe(instruction_sets.machine(settings.threads)))
    started = time.perf_counter()
    out = {"overhead": overhead(settings.rounds)} if only_overhead else run(settings)
    click.echo(f"took {time.perf_counter() - started:.0f} s")
    if json_path:
        json_path.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    try:
        main(standalone_mode=True)
    except MinifloatError as error:
        sys.exit(f"error: {error}")
