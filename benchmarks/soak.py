"""Keep a server under twice the load that it admits for minutes, with aborts, slow clients, bad requests and restarts.

    python benchmarks/soak.py --minutes 60
    python benchmarks/soak.py MODEL --minutes 10 --json soak.json

Three servers each live a tenth of the time and are told to stop under full load, by SIGHUP, SIGTERM and SIGHUP: each
must finish what it admitted and exit with status 0. The fourth lives for the rest. Each greedy answer must equal the
answer that a single client received before. Of the fourth server, memory after a tenth of the time is compared with
its end (at most 2% more), and descriptors after the load with those of the first before it. The exit status is 1 if
any check fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil
from serve_load import KINDS, SLOW, STORYBOOK, Load, start, work_of
from serve_process import HOST, free_port

_STOPS = (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP)
_SHARE = 0.1  #: of the time: the life of each of the first servers, and when memory is to be flat from
_GROWTH = 0.02  #: of memory that is allowed
_BAD = (b"\x16\x03\x01 not HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 40_000, b"POST /v1/com")
_KINDS = KINDS | dict.fromkeys(SLOW, 4) | {"not HTTP": 4}


@dataclass
class Samples:
    """What was seen of a server.

    Attributes:
        began: Time of the first sample.
        rss: Seconds after that, and resident bytes.
        descriptors: Number of descriptors of the first server before the load, and of this one after it.
    """

    began: float
    rss: list[tuple[float, int]] = field(default_factory=list)
    descriptors: tuple[int, int] = (0, 0)

    def growth(self, after: float) -> float:
        """Return how much larger memory is at the end than after some seconds: medians of a tenth of the samples."""
        later = [size for seconds, size in self.rss if seconds >= after]
        part = max(1, len(later) // 10)
        return statistics.median(later[-part:]) / statistics.median(later[:part]) - 1


async def _send_bytes(load: Load) -> None:
    """Send what is no request; the server may answer and close, or close."""
    try:
        reader, writer = await asyncio.open_connection(HOST, load.port)
        try:
            writer.write(load.random.choice(_BAD))
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 120)
        finally:
            writer.close()
    except ConnectionError:
        pass
    load.tally.done["not HTTP"] += 1


async def _keep_asking(load: Load, until: Callable[[], bool]) -> None:
    while not until():
        kind = load.random.choices(list(_KINDS), list(_KINDS.values()))[0]
        await (_send_bytes(load) if kind == "not HTTP" else load.request(kind))


async def _sample(process: psutil.Process, samples: Samples, until: Callable[[], bool]) -> None:
    while not until():
        samples.rss.append((time.monotonic() - samples.began, process.memory_info().rss))
        await asyncio.sleep(1)


async def _soak(load: Load, minutes: float, clients: int, begin: Callable[[], subprocess.Popen[bytes]]) -> Samples:
    """Run all servers under one crowd of clients; return what was seen of the last."""
    first = begin()
    processes = [first]
    try:
        await load.learn(range(4, 25, 10))
        before = psutil.Process(first.pid).num_fds()
        over = False
        crowd = [asyncio.create_task(_keep_asking(load, lambda: over)) for _ in range(clients)]
        for stop in _STOPS:
            await asyncio.sleep(minutes * 60 * _SHARE)
            load.is_stopping = True
            load.stops += 1
            processes[-1].send_signal(stop)
            status = await asyncio.to_thread(processes[-1].wait, 120)
            if status:
                load.tally.problems.append(f"{stop.name}: exit status {status}")
            processes.append(await asyncio.to_thread(begin))
            load.is_stopping = False
        watched = psutil.Process(processes[-1].pid)
        samples = Samples(time.monotonic())
        life = minutes * 60 * (1 - len(_STOPS) * _SHARE)
        sampling = asyncio.create_task(_sample(watched, samples, lambda: over))
        await asyncio.sleep(life)
        over = True
        await asyncio.gather(*crowd, sampling)
        await asyncio.sleep(3)
        samples.descriptors = (before, watched.num_fds())
        now = await asyncio.to_thread(work_of, load.port)
        if now["running"] or now["waiting"] or now["kv_usage"]:
            load.tally.problems.append(f"still at work: {now}")
        processes[-1].send_signal(signal.SIGTERM)
        if status := await asyncio.to_thread(processes[-1].wait, 60):
            load.tally.problems.append(f"SIGTERM at the end: exit status {status}")
        return samples
    finally:
        for process in processes:
            process.kill()


@click.command()
@click.argument("model", default=STORYBOOK, type=click.Path(exists=True, path_type=Path))
@click.option("--minutes", default=10.0, show_default=True)
@click.option("--running", default=16, show_default=True, help="Maximum number of running requests.")
@click.option("--waiting", default=16, show_default=True, help="Maximum number of queued requests.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "result_file", type=click.Path(path_type=Path), help="Write the figures here too.")
def main(model: Path, minutes: float, running: int, waiting: int, seed: int, result_file: Path | None) -> None:
    """Soak a server of MODEL."""
    load = Load(free_port(), seed)
    clients = 2 * (running + waiting)
    with tempfile.TemporaryDirectory() as folder:
        samples = asyncio.run(_soak(load, minutes, clients, lambda: start(model, load.port, running, waiting, folder)))
    growth = samples.growth(minutes * 60 * _SHARE)
    problems = load.tally.problems
    if growth > _GROWTH:
        problems.append(f"memory grew by {growth:.1%} after the first {minutes * _SHARE:g} minutes")
    if samples.descriptors[1] > samples.descriptors[0]:
        problems.append(f"descriptors: {samples.descriptors[0]} before the load, {samples.descriptors[1]} after it")
    figures: dict[str, Any] = {
        "minutes": minutes,
        "clients": clients,
        "requests": dict(sorted(load.tally.done.items())),
        "refused_with_503": load.tally.refused,
        "stops": [stop.name for stop in _STOPS],
        "rss_growth": growth,
        "rss_bytes": [samples.rss[0][1], samples.rss[-1][1]],
        "descriptors": samples.descriptors,
        "problems": problems,
    }
    if result_file is not None:
        result_file.write_text(json.dumps(figures, indent=1))
    click.echo(
        f"{minutes:g} min, {clients} clients: {sum(load.tally.done.values()):,} requests, {load.tally.refused:,} times "
        f"503, {len(_STOPS)} restarts under load; memory {growth:+.1%} after a tenth of the time "
        f"({samples.rss[0][1] >> 20} -> {samples.rss[-1][1] >> 20} MiB), descriptors {samples.descriptors[0]} -> "
        f"{samples.descriptors[1]}, wrong answers and failures {len(problems)}"
    )
    click.echo("  " + ", ".join(f"{kind} {count}" for kind, count in sorted(load.tally.done.items())))
    if problems:
        raise SystemExit(os.linesep.join(problems[:20]))


if __name__ == "__main__":
    main()
