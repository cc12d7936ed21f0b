"""Measure loading a checkpoint: time against reading its files, and peak memory against the loaded model.

    python benchmarks/load.py /tmp/1b /tmp/1b-fp8-block /tmp/1b-mxfp4

A first read fills the page cache, if it is large enough. Then `--rounds` times in turn, the files are read into one
buffer and the checkpoint is loaded in a process of its own; times are medians. "peak" is the peak resident set minus
the resident set of the process after all imports and before loading; "held" is the bytes of the model's parameters and
buffers. `--impl reference` loads without packing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click

from minifloat import Checkpoint

LOAD = """
import json, resource, sys, time
import torch, transformers
from minifloat.model.runtime.load import load
load.__module__, transformers.AutoModelForCausalLM, transformers.GenerationConfig
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, start = peak(), time.perf_counter()
model = load(sys.argv[1], impl=sys.argv[2])
seconds = time.perf_counter() - start
held = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
print(json.dumps({"seconds": seconds, "peak": peak() - before, "held": sum(held.values())}))
"""
BLOCK = 16 << 20


def read_files(folder: Path) -> float:
    """Return the seconds to read every shard with one thread."""
    buffer = bytearray(BLOCK)
    with Checkpoint.open(folder) as checkpoint:
        shards = {checkpoint.shard_path(info.shard) for info in checkpoint.tensors.values()}
    start = time.perf_counter()
    for shard in shards:
        descriptor = os.open(shard, os.O_RDONLY)
        while os.readv(descriptor, [buffer]):
            pass
        os.close(descriptor)
    return time.perf_counter() - start


def load(folder: Path, impl: str) -> dict[str, float]:
    """Load the checkpoint in a process of its own; return its seconds, and its peak and held bytes."""
    done = subprocess.run([sys.executable, "-c", LOAD, str(folder), impl], check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--impl", default="auto", show_default=True)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
def main(folders: tuple[Path, ...], impl: str, rounds: int) -> None:
    """Measure loading the checkpoints FOLDERS."""
    click.echo(f"{'checkpoint':<16} {'GB':>6} {'read s':>8} {'load s':>8} {'GB/s':>6} {'held':>10} {'peak':>10}")
    for folder in folders:
        with Checkpoint.open(folder) as checkpoint:
            nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
        read_files(folder)
        reads, loads = [], []
        for _ in range(rounds):
            reads.append(read_files(folder))
            loads.append(load(folder, impl))
        seconds = statistics.median(run["seconds"] for run in loads)
        click.echo(
            f"{folder.name:<16} {nbytes / 1e9:>6.2f} {statistics.median(reads):>8.2f} {seconds:>8.2f} "
            f"{nbytes / seconds / 1e9:>6.2f} {loads[0]['held'] / 2**20:>6.0f} MiB "
            f"{max(run['peak'] for run in loads) / 2**20:>6.0f} MiB"
        )


if __name__ == "__main__":
    main()
