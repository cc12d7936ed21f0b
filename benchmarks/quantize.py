"""Measure time and memory of `minifloat quantize` against `cp` of the same files, interleaved in one run.

    python benchmarks/make_checkpoint.py /tmp/1b
    python benchmarks/quantize.py /tmp/1b --scheme fp8-block --scheme mxfp4

Times are those of whole processes, including start-up. `cp` reads and writes every byte once and does not wait for the
disk; `cp, synced` waits, as `minifloat quantize` waits for every shard before it records the shard. Peak memory is that
of the process, from the kernel's accounting. Before each run an unmeasured `cp` is written, deleted and synced, so that
each run finds the source in the page cache and the same amount of recently freed memory for its output. (On virtual
machines, memory that was free for long has to be fetched from the host first, which can take longer than the copy.)
With `--cold` the source is dropped from the page cache before each run instead, and every run reads it from the disk.
Python may write bytecode in the warm-up, so that modules are compiled as in an installation.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from minifloat.deploy.diagnosis import doctor


def measure(command: list[str]) -> tuple[float, float, int]:
    """Return wall seconds, CPU seconds and peak bytes of one process."""
    started = time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - started
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"failed: {' '.join(command)}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def drop_from_cache(source: Path) -> None:
    """Drop the shards of a checkpoint from the page cache."""
    for path in source.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def commands(source: Path, out: Path, schemes: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the commands to measure by name, `cp` first."""
    copy = ["cp", "-r", str(source), str(out)]
    synced = ["sh", "-c", f'cp -r "{source}" "{out}" && sync "{out}"/*']
    quantize = [sys.executable, "-m", "minifloat", "quantize", str(source), str(out), "--quiet", "--scheme"]
    return {"cp": copy, "cp, synced": synced} | {scheme: [*quantize, scheme] for scheme in schemes}


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--scheme", "schemes", multiple=True, default=("fp8-block", "mxfp4"), show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--cold", is_flag=True, help="Drop the source from the page cache before each run.")
@click.option(
    "--folder", type=click.Path(exists=True, path_type=Path), help="Folder for the outputs.  [default: temporary]"
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for the results.")
def main(
    source: Path, schemes: tuple[str, ...], rounds: int, cold: bool, folder: Path | None, json_path: Path | None
) -> None:
    """Measure quantizing the checkpoint SOURCE."""
    work = Path(tempfile.mkdtemp(dir=folder))
    out = work / "out"
    todo = commands(source, out, schemes)
    results: dict[str, list[tuple[float, float, int]]] = {name: [] for name in todo}
    try:
        for round_number in range(rounds + 1):
            for name, command in todo.items():
                measure(todo["cp"])
                shutil.rmtree(out)
                os.sync()
                if cold:
                    drop_from_cache(source)
                figures = measure(command)
                shutil.rmtree(out)
                if round_number:
                    results[name].append(figures)
    finally:
        shutil.rmtree(work)
    total = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    state = "read from the disk" if cold else "in the page cache"
    machine = doctor().machine
    click.echo(f"{source.name}: {total:,} bytes {state}, {rounds} rounds after one to warm up")
    click.echo(f"{machine.processor}, {machine.cores} cores, {machine.instruction_set}")
    click.echo(
        f"{'':<12} {'median s':>9} {'min s':>7} {'max s':>7} {'CPU s':>7} {'/ cp':>6} {'/ synced':>8} {'peak MiB':>9}"
    )
    for name, runs in results.items():
        walls = [run[0] for run in runs]
        ratios = [
            statistics.median(run[0] / copy[0] for run, copy in zip(runs, results[base], strict=True))
            for base in ("cp", "cp, synced")
        ]
        click.echo(
            f"{name:<12} {statistics.median(walls):>9.2f} {min(walls):>7.2f} {max(walls):>7.2f} "
            f"{statistics.median(run[1] for run in runs):>7.2f} {ratios[0]:>5.2f}x {ratios[1]:>7.2f}x "
            f"{max(run[2] for run in runs) / 2**20:>9.1f}"
        )
    if json_path:
        json_path.write_text(json.dumps({"bytes": total, "rounds": rounds, "runs": results}, indent=2))


if __name__ == "__main__":
    main()
