"""Measure the peak memory of `quantize_checkpoint` above that of an interpreter that has imported torch.

    python benchmarks/memory.py /tmp/1b /tmp/2b --scheme fp8-block --scheme nvfp4

Each run is a process of its own; the figure is its peak resident set minus that of `python -c "import torch"`. With
`--impl reference` the cast is the one in plain torch, as on a machine without a C++ compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from minifloat import Checkpoint

RUN = (
    "import sys, torch\n"
    "from minifloat import QuantizeOptions, quantize_checkpoint\n"
    "quantize_checkpoint(sys.argv[1], sys.argv[2], sys.argv[3], QuantizeOptions(impl=sys.argv[4]))"
)


def peak(arguments: list[str]) -> int:
    """Return the peak resident bytes of a Python process with these arguments."""
    child = subprocess.Popen([sys.executable, "-c", *arguments])
    _, status, usage = os.wait4(child.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit("the run failed")
    return usage.ru_maxrss * 1024


@click.command()
@click.argument("sources", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--scheme", "schemes", multiple=True, default=("fp8-block", "nvfp4"), show_default=True)
@click.option("--impl", default="auto", show_default=True)
@click.option(
    "--folder", type=click.Path(exists=True, path_type=Path), help="Folder for the outputs.  [default: temporary]"
)
def main(sources: tuple[Path, ...], schemes: tuple[str, ...], impl: str, folder: Path | None) -> None:
    """Measure quantizing the checkpoints SOURCES."""
    floor = peak(["import torch"])
    click.echo(f"interpreter with torch imported: {floor / 2**20:.0f} MiB")
    click.echo(
        f"{'checkpoint':<16} {'GB':>6} {'largest tensor':>15} {'scheme':<10} {'peak above torch':>17} {'limit':>10}"
    )
    for source in sources:
        with Checkpoint.open(source) as checkpoint:
            sizes = [info.nbytes for info in checkpoint.tensors.values()]
        limit = 2 * max(sizes) + (256 << 20)
        for scheme in schemes:
            with tempfile.TemporaryDirectory(dir=folder) as out:
                above = peak([RUN, str(source), f"{out}/out", scheme, impl]) - floor
            click.echo(
                f"{source.name:<16} {sum(sizes) / 1e9:>6.2f} {max(sizes) / 2**20:>11.0f} MiB {scheme:<10} "
                f"{above / 2**20:>13.0f} MiB {limit / 2**20:>6.0f} MiB"
            )


if __name__ == "__main__":
    main()
