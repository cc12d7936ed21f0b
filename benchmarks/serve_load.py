"""Overload a server and check that every answer is correct, excess requests are refused, and no resource leaks.

    python benchmarks/serve_load.py                        # 10,000 requests, at five times what may run and wait
    python benchmarks/serve_load.py MODEL --requests 2000

`minifloat serve` runs as a process of its own. More clients than the server admits send a mixture: completions and
chats, streamed and whole, one and several answers, clients that disconnect in the middle, and invalid requests. Each
greedy answer must equal the answer that a single client received before. A 503 must have a Retry-After header, and its
client tries again after that time. At the end no request may be running, and memory, descriptors and threads are
printed with their values before the load. The exit status is 1 if any check fails.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

import click
import psutil
from serving_load import STORYBOOK, Tally, free_port, run, start, work_of


@click.command()
@click.argument("model", default=STORYBOOK, type=click.Path(exists=True, path_type=Path))
@click.option("--requests", default=10_000, show_default=True)
@click.option("--running", default=16, show_default=True, help="Maximum number of running requests.")
@click.option("--waiting", default=64, show_default=True, help="Maximum number of queued requests.")
@click.option("--overload", default=5.0, show_default=True, help="Clients, as a multiple of running + waiting.")
@click.option("--seed", default=0, show_default=True)
def main(model: Path, requests: int, running: int, waiting: int, overload: float, seed: int) -> None:
    """Overload a server of MODEL and check its answers."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        process = start(model, port, running, waiting, folder)
        try:
            watched = psutil.Process(process.pid)
            asyncio.run(run(port, requests // 20, running, seed))  # warm up: pools and caches grow to their size
            before = (watched.memory_info().rss, watched.num_fds(), watched.num_threads())
            began = time.perf_counter()
            load = asyncio.run(run(port, requests, int(overload * (running + waiting)), seed))
            seconds = time.perf_counter() - began
            time.sleep(1)
            now = work_of(port)
            if now["running"] or now["waiting"] or now["kv_usage"]:
                load.tally.problems.append(f"still at work: {now}")
            after = (watched.memory_info().rss, watched.num_fds(), watched.num_threads())
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
        finally:
            process.kill()
    _report(load.tally, seconds, before, after)
    if load.tally.problems or status or sum(load.tally.done.values()) != requests:
        raise SystemExit(f"exit status {status}; problems: {os.linesep.join(load.tally.problems[:10])}")


def _report(tally: Tally, seconds: float, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    total = sum(tally.done.values())
    cuts = statistics.quantiles(tally.seconds, n=100)
    print(f"{total} requests in {seconds:.1f} s ({total / seconds:.0f} per second), {tally.refused} times 503")
    print("  " + ", ".join(f"{kind} {count}" for kind, count in sorted(tally.done.items())))
    print(f"  served attempts: median {cuts[49] * 1e3:.0f} ms, p99 {cuts[98] * 1e3:.0f} ms")
    print(f"  wrong answers and failures: {len(tally.problems)}")
    for name, unit, then, now in zip(("RSS", "descriptors", "threads"), (1 << 20, 1, 1), before, after, strict=True):
        print(f"  {name}: {then / unit:.0f} -> {now / unit:.0f}{' MiB' if unit > 1 else ''}")


if __name__ == "__main__":
    main()
