"""Measure the import time of the package and the start-up time of the command line, as medians of whole processes.

python benchmarks/startup.py [CHECKPOINT]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import click


def median_ms(arguments: list[str], rounds: int) -> float:
    """Return the median wall time of a Python process in milliseconds, after one process to warm up."""
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:]) * 1e3


@click.command()
@click.argument("checkpoint", required=False)
@click.option("--rounds", default=9, show_default=True)
def main(checkpoint: str | None, rounds: int) -> None:
    """Print the table; `inspect` is timed on CHECKPOINT."""
    commands = {
        "python -c pass": ["-c", "pass"],
        "python -c 'import minifloat'": ["-c", "import minifloat"],
        "minifloat --help": ["-m", "minifloat", "--help"],
    }
    if checkpoint:
        commands["minifloat inspect"] = ["-m", "minifloat", "inspect", checkpoint]
    for name, arguments in commands.items():
        click.echo(f"{name:<30} {median_ms(arguments, rounds):>6.0f} ms")


if __name__ == "__main__":
    main()
