"""Measure our linears against torch's and other libraries', the required speeds and the memory bandwidth.

    python benchmarks/linear.py --json linear.json              # the full table
    python benchmarks/linear.py --isa avx2                      # kernels and torch both held to AVX2
    python benchmarks/linear.py --every-isa --shapes llama-8b/o --peers "torch FP32" --gigabytes 0.3 --rounds 3
    python benchmarks/linear.py --quick --formats fp8,mxfp4     # one shape, four M, no peers
    python benchmarks/linear.py --overhead --pack --fused       # the cost of a call, of packing, of separate calls

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
from typing import TYPE_CHECKING, Any

import click
import every_isa
import instruction_sets
import linear_bars
import linear_shapes
from linear_settings import Settings

from minifloat.errors import MinifloatError, UsageError
from minifloat.kernels import native
from minifloat.kernels.bandwidth import ReadBandwidth, read_bandwidth

# Modules that import torch come after force(), because torch reads its instruction set limits when it is imported.
if TYPE_CHECKING:
    from linear_report import Row

ALL_M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
QUICK_M = (1, 16, 64, 256)
#: Up to this many rows, reading the weights is the limit, so that the share of the read bandwidth is meaningful.
MEMORY_BOUND = 64
#: Side of the square weight that tracks the machine's drift, and of the square product of the peak rate.
STATE_SIDE = 4096
PEAK_SIDE = 2048
PEAK_SECONDS = 0.5


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
    return Reference(bandwidth, measure(baseline, 1, STATE_SIDE, settings.rounds, 1.0)[linear_bars.BASELINE])


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


def table(settings: Settings, out: dict[str, Any]) -> list[Row]:
    """Measure and print every case; add the cases with all their samples to `out`."""
    from linear_contenders import contenders, memory_read
    from linear_report import HEADER, Case, line, record, rows_of
    from timing import measure

    peak = out["torch_peak_gflops"] = peak_gflops()
    click.echo(f"torch BF16 peak, {PEAK_SIDE}^3: {peak:.0f} GFLOP/s")
    cases: list[dict[str, object]] = []
    all_rows = []
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
            rows = rows_of(case, native.isa())
            for row in rows:
                click.echo(line(row, peak))
            click.echo()
            cases.append(record(case, rows))
            all_rows += rows
        del compared
    return all_rows


def conclude(rows: list[Row], out: dict[str, Any]) -> int:
    """Print the summary and return the number of missed floors."""
    from linear_report import misses, summary

    lines = summary(rows, native.isa())
    missed = misses(rows)
    judged = sum(row.verdict is not None for row in rows)
    click.echo(
        "\n".join(["", *lines, "", f"{len(missed)} of {judged} lines miss a floor" + ", the worst:" * bool(missed)])
    )
    for row in missed[:10]:
        click.echo(f"  {row.shape} M={row.m} {row.contender}: {row.verdict}")
    out["summary"] = lines
    out["missed"] = len(missed)
    return len(missed)


def run(settings: Settings, extras: list[str], with_table: bool) -> dict[str, Any]:
    """Run the selected measurements and return the record for JSON."""
    import torch
    from linear_contenders import missing

    torch.set_num_threads(settings.threads)
    facts = instruction_sets.machine(settings.threads)
    click.echo(instruction_sets.describe(facts))
    out: dict[str, Any] = {"machine": facts, "rounds": settings.rounds, "gigabytes": settings.nbytes / 1e9}
    with torch.inference_mode():
        before = reference(settings)
        click.echo(f"before: {before.describe()}")
        if with_table:
            for peer in missing(settings.peers):
                click.echo(f"{peer}: not installed")
            out["missed"] = conclude(table(settings, out), out)
        for name in extras:
            out[name] = _extra(name)(settings, before.bandwidth.median)
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


def _every(isa: str | None, json_path: Path | None, check: bool) -> int:
    """Measure every instruction set with the other options of the command line; return the exit status."""
    if isa:
        raise UsageError("--every-isa runs all instruction sets: leave out --isa")
    own = {"--every-isa", "--check"}
    arguments = [argument for argument in sys.argv[1:] if argument not in own]
    if json_path:
        at = next(i for i, argument in enumerate(arguments) if argument.startswith("--json"))
        del arguments[at : at + (1 if "=" in arguments[at] else 2)]
    records = every_isa.run(arguments)
    if json_path:
        json_path.write_text(json.dumps(records, indent=1))
    return int(check and every_isa.losses(records) > 0)


def _extra(name: str) -> Callable[[Settings, float], object]:
    import linear_extras

    extras: dict[str, Callable[[Settings, float], object]] = {
        "overhead": linear_extras.overhead,
        "pack": linear_extras.packing,
        "fused": linear_extras.fused,
    }
    return extras[name]


@click.command(help=__doc__.split("\n")[0])
@click.option("--shapes", default=linear_shapes.DEFAULT, show_default=True, help="model, model/layer, NxK, all; commas")
@click.option("--m", "ms", default=",".join(map(str, ALL_M)), show_default=True, help="Rows of the input.")
@click.option("--formats", default="all", show_default=True, help=", ".join(linear_bars.FORMATS))
@click.option("--peers", default="all", show_default=True, help="Names separated by commas, all, or none.")
@click.option("--gigabytes", default=1.0, show_default=True, help="Size of each contender's weights.")
@click.option("--rounds", default=7, show_default=True, help="Number of samples of each contender and case.")
@click.option("--seconds", default=0.1, show_default=True, help="Approximate time of a sample.")
@click.option("--threads", default=0, help="Threads of torch and the kernels.  [default: torch's]")
@click.option("--isa", help="Limit the kernels and torch to this instruction set.")
@click.option("--every-isa", "every", is_flag=True, help="Each instruction set of this machine in turn, and one table.")
@click.option("--quick", is_flag=True, help="One shape, M = 1, 16, 64, 256, five rounds, no peers.")
@click.option("--overhead", is_flag=True, help="Only measure a call on a tiny weight.")
@click.option("--pack", is_flag=True, help="Only compare packing with reading and copying.")
@click.option("--fused", is_flag=True, help="Only compare q/k/v and gate/up in one call with separate calls.")
@click.option("--everything", is_flag=True, help="The table, --overhead, --pack and --fused.")
@click.option("--check", is_flag=True, help="Exit with status 1 if a floor is missed.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for all results and samples.")
def main(
    shapes: str, ms: str, isa: str | None, every: bool, quick: bool, json_path: Path | None, **options: Any
) -> None:
    """Measure linears."""
    if every:
        sys.exit(_every(isa, json_path, options["check"]))
    instruction_sets.force(isa)
    import torch
    from linear_contenders import PEERS

    flags = [name for name in ("overhead", "pack", "fused") if options[name]]
    everything = options["everything"]
    if quick:
        shapes = "llama-8b/o" if shapes == linear_shapes.DEFAULT else shapes
        ms = ",".join(map(str, QUICK_M)) if ms == ",".join(map(str, ALL_M)) else ms
    settings = Settings(
        shapes=linear_shapes.parse_shapes(shapes),
        ms=tuple(int(m) for m in ms.split(",")),
        formats=linear_bars.parse_formats(options["formats"]),
        peers=() if quick else linear_bars.parse_names(options["peers"], PEERS, "peers"),
        nbytes=int(options["gigabytes"] * 1e9),
        rounds=5 if quick else options["rounds"],
        seconds=options["seconds"],
        threads=options["threads"] or min(torch.get_num_threads(), len(os.sched_getaffinity(0))),
        check=options["check"],
    )
    started = time.perf_counter()
    out = run(settings, ["overhead", "pack", "fused"] if everything else flags, everything or not flags)
    click.echo(f"took {time.perf_counter() - started:.0f} s")
    if json_path:
        json_path.write_text(json.dumps(out, indent=1))
    if settings.check and out.get("missed"):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main(standalone_mode=True)
    except MinifloatError as error:
        sys.exit(f"error: {error}")
