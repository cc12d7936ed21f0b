"""Measure time and peak memory of layer-by-layer calibration against calibration of the whole model.

    python benchmarks/make_checkpoint.py /tmp/1b            # 1.1B parameters of the shape of a Llama
    python benchmarks/calibrate_layerwise.py /tmp/1b
    python benchmarks/calibrate_layerwise.py /tmp/1b --max-memory-mib 256 --samples 32

Each run is a process of its own, and the two methods take turns. The time covers loading and calibration but not the
imports; a first read fills the page cache. Memory is the peak resident set of the process; the last column subtracts
the peak of a process that only runs the imports. Sequences are random token ids, so no tokenizer is needed. The
benchmark checks that the statistics of all runs are bit-identical.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from minifloat.calibration.result import read_stats
from minifloat.calibration.stats import ActivationStats

IMPORTS = "import minifloat.calibration.calibrate"
RUN = """
import random, sys, time
from pathlib import Path
from dataclasses import replace
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.calibrate import calibrate_layerwise
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.model import calibrate_whole
from minifloat.calibration.result import write_stats
from minifloat.checkpoint import Checkpoint
model, out, histogram, max_memory, device, *sizes = sys.argv[1:]
samples, length, vocabulary = map(int, sizes)
draw = random.Random(0)
data = CalibrationSet(tuple(tuple(draw.randrange(vocabulary) for _ in range(length)) for _ in range(samples)))
options = CalibrateOptions(histogram=histogram == "True", device=device, work_dir=Path(out).with_suffix(".work"))
start = time.perf_counter()
with Checkpoint.open(model) as checkpoint:
    opened = CalibrationModel(checkpoint, options)
    if max_memory == "None":
        stats = calibrate_whole(opened, data, options)
    else:
        stats = calibrate_layerwise(opened, data, replace(options, max_memory=int(max_memory)))
print(time.perf_counter() - start)
write_stats(stats, out)
"""


def measure(arguments: list[object]) -> tuple[float, int]:
    """Return the seconds that a child process prints, and its peak resident bytes."""
    child = subprocess.Popen([sys.executable, "-c", *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout as output:
        printed = output.read()
    _, status, usage = os.wait4(child.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit("the run failed")
    return float(printed or "nan"), usage.ru_maxrss * 1024


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--samples", default=8, show_default=True)
@click.option("--seq-len", default=512, show_default=True)
@click.option("--vocabulary", default=32000, show_default=True, help="Exclusive upper bound of the token ids.")
@click.option("--histogram", is_flag=True, help="Record histograms too.")
@click.option("--max-memory-mib", default=1024, show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--device", default="cpu", show_default=True)
def main(
    checkpoint: Path,
    samples: int,
    seq_len: int,
    vocabulary: int,
    histogram: bool,
    max_memory_mib: int,
    rounds: int,
    device: str,
) -> None:
    """Calibrate CHECKPOINT both ways."""
    files = list(checkpoint.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as shard:  # in pieces, because a child inherits the peak memory of this process
            while shard.read(1 << 20):
                pass
    _, floor = measure([IMPORTS])
    click.echo(f"{checkpoint}: {sum(file.stat().st_size for file in files) / 2**20:,.0f} MiB of weights")
    click.echo(f"{samples} sequences of {seq_len} tokens; imports alone: {floor / 2**20:,.0f} MiB")
    kinds = {"whole model": None, f"{max_memory_mib} MiB of weights": max_memory_mib << 20}
    results: dict[str, list[tuple[float, int]]] = {kind: [] for kind in kinds}
    written: list[tuple[str, ActivationStats]] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stats.safetensors"
        for _ in range(rounds):
            for kind, limit in kinds.items():
                run = measure([RUN, checkpoint, out, histogram, limit, device, samples, seq_len, vocabulary])
                results[kind].append(run)
                written.append((kind, read_stats(out)))
    baseline = min(seconds for seconds, _ in results["whole model"])
    click.echo(f"\n{'':<24}{'seconds':>9}{'ratio':>7}{'peak RSS MiB':>14}{'above imports':>15}")
    for kind, runs in results.items():
        seconds, peak = min(seconds for seconds, _ in runs), max(peak for _, peak in runs)
        above = (peak - floor) / 2**20
        click.echo(f"{kind:<24}{seconds:>9.2f}{seconds / baseline:>7.2f}{peak / 2**20:>14,.0f}{above:>15,.0f}")
    click.echo(f"\nstatistics {differences(written) or 'are the same to the bit'}")


def differences(runs: list[tuple[str, ActivationStats]]) -> str:
    """Return the differences from the first run as text; empty if there are none."""
    (_, first), *later_runs = runs
    differences_by_run = []
    for kind, stats in later_runs:
        modules = [name for name, module in stats.inputs.items() if module != first.inputs[name]]
        if stats != first:
            differences_by_run.append(f"DIFFER ({kind}): {len(modules)} of {len(stats.inputs)} inputs {modules[:4]}")
    return "; ".join(differences_by_run)


if __name__ == "__main__":
    main()
