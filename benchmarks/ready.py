"""Measure the time from the start of a process to an open engine, to a server that answers, and to a first token.

    python benchmarks/ready.py MODEL [--rounds 5] [--other ../checkout/src]

The last columns are parts of it: `import torch` alone, which is a floor of all others, and the imports of the web
server without torch. Each round starts new processes; `--other` adds those of the source folder of another checkout, in
turns. The files of MODEL are in the page cache after the first round, which is not counted.
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
_IMPORT = "import time; started = time.perf_counter(); import {}; print(time.perf_counter() - started)"
_WEB = "fastapi, uvicorn, prometheus_client"
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


def token_seconds(model: str, environment: dict[str, str]) -> float:
    """Return the seconds from the start of `minifloat generate` to the first text after the prompt."""
    prompt = "Once upon a time"
    started = time.perf_counter()
    command = [sys.executable, "-m", "minifloat", "generate", model, prompt, "-n", "4"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    descriptor, text = process.stdout.fileno(), b""
    while len(text) <= len(prompt) and (piece := os.read(descriptor, 1 << 16)):
        text += piece
    seconds = time.perf_counter() - started
    process.stdout.close()
    process.wait()
    if len(text) <= len(prompt):
        raise click.ClickException(f"minifloat generate wrote no text and ended with status {process.returncode}")
    return seconds


def import_seconds(modules: str, environment: dict[str, str]) -> float:
    """Return the seconds that imports take in a new process."""
    command = [sys.executable, "-c", _IMPORT.format(modules)]
    return float(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout)


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
    environments = {"this checkout": dict(os.environ)}
    if other is not None:
        environments["the other"] = {**os.environ, "PYTHONPATH": str(other.resolve())}
    results: dict[str, list[tuple[float, ...]]] = {name: [] for name in environments}
    for index in range(rounds + 1):
        for name, environment in environments.items():
            seconds = (
                *engine_seconds(model, environment),
                server_seconds(model, environment),
                token_seconds(model, environment),
                import_seconds("torch", environment),
                import_seconds(_WEB, environment),
            )
            if index:
                results[name].append(seconds)
    print(
        "| s | process with an engine | importing Engine | Engine(MODEL) | serve to its first answer "
        "| generate to its first token | import torch | imports of the web server |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, measured in results.items():
        print(row(name, measured))


if __name__ == "__main__":
    main()
