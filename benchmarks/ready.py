"""Measure the time from the start of a process to an open engine, and to a server that answers.

    python benchmarks/ready.py MODEL [--rounds 5] [--other ../checkout/src]

Each round starts new processes; `--other` is the source folder of another checkout, whose processes take turns with
those of this one. The files of MODEL are in the page cache after the first round, which is not counted.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import click

_POLL_SECONDS = 0.02
_OPEN = """
import sys, time
started = time.perf_counter()
from minifloat import Engine
imported = time.perf_counter()
Engine(sys.argv[1])
print(imported - started, time.perf_counter() - imported)
"""


def engine_seconds(model: str, environment: dict[str, str]) -> tuple[float, float, float]:
    """Return the seconds of a process that opens an engine, of `from minifloat import Engine`, and of `Engine`."""
    started = time.perf_counter()
    command = [sys.executable, "-c", _OPEN, model]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds = time.perf_counter() - started
    imports, opening = map(float, output.split())
    return seconds, imports, opening


def server_seconds(model: str, environment: dict[str, str]) -> float:
    """Return the seconds from the start of `minifloat serve` to its first answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.perf_counter()
    command = [sys.executable, "-m", "minifloat", "serve", model, "--port", str(port), "--quiet"]
    server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60):
                    return time.perf_counter() - started
            except (urllib.error.URLError, OSError):
                time.sleep(_POLL_SECONDS)
        raise click.ClickException(f"minifloat serve ended with status {server.returncode}")
    finally:
        server.terminate()
        server.wait()


def row(name: str, rounds: Sequence[tuple[float, ...]]) -> str:
    """Return a row of the table: the median of each column, with the smallest and the largest value."""
    columns = zip(*rounds, strict=True)
    cells = [f"{statistics.median(column):.2f} ({min(column):.2f} .. {max(column):.2f})" for column in columns]
    return f"| {name} | {' | '.join(cells)} |"


@click.command()
@click.argument("model")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--other", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Another checkout's src.")
def main(model: str, rounds: int, other: Path | None) -> None:
    """Print the seconds until an engine and a server for MODEL, a folder, are ready."""
    sources = {"this checkout": None, **({} if other is None else {"the other": other.resolve()})}
    results: dict[str, list[tuple[float, ...]]] = {name: [] for name in sources}
    for index in range(rounds + 1):
        for name, source in sources.items():
            environment = dict(os.environ) | ({} if source is None else {"PYTHONPATH": str(source)})
            seconds = (*engine_seconds(model, environment), server_seconds(model, environment))
            if index:
                results[name].append(seconds)
    print("| s | process with an engine | importing Engine | Engine(MODEL) | serve to its first answer |")
    print("|---|---|---|---|---|")
    for name, measured in results.items():
        print(row(name, measured))


if __name__ == "__main__":
    main()
