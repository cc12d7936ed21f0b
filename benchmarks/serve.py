"""Measure `minifloat serve` under load through HTTP: throughput, latencies, memory, and the time until it is ready.

    python benchmarks/serve.py /tmp/models/tinyllama-1.1b-fp8 /tmp/models/tinyllama-1.1b-mxfp4 --json serve.json

Each checkpoint gets a server in a process of its own. In the "concurrency" load that many clients run at a time, and
each sends its next request when its last one is answered; in the "mixed" load eight clients decode while long prompts
arrive. The clients measure the times; they stream over HTTP and share the machine's cores with the server. RSS is that
of the server process; the limit is its weights, its KV cache and 700 MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import instruction_sets
import numpy as np
import psutil

from minifloat import Checkpoint
from minifloat.kernels.processors import bound_spin

HOST = "127.0.0.1"
MEBI = 1 << 20
ALLOWED_BYTES = 700 * MEBI
ALLOWED_ITL = 3.0
READ_BLOCK = 16 << 20
MIXED_CLIENTS, ARRIVALS = 8, 8


@dataclass
class Answer:
    """The times of one request, in seconds of `time.perf_counter`.

    Attributes:
        sent: When the request was sent.
        tokens: Number of generated tokens.
        received: When each event with text was received.
    """

    sent: float
    tokens: int = 0
    received: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Time to first token in seconds."""
        return self.received[0] - self.sent

    @property
    def itls(self) -> list[float]:
        """Seconds between consecutive events."""
        return [after - before for before, after in zip(self.received, self.received[1:], strict=False)]


class Server:
    """A server in a process of its own. A context manager."""

    def __init__(self, model: Path, threads: int, options: tuple[str, ...]) -> None:
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "minifloat", "serve", str(model), "--port", str(self.port), "--quiet"]
        self.started = time.perf_counter()
        self.process = subprocess.Popen([*command, "--threads", str(threads), *options])
        self.ready = self._wait()
        self.model: dict[str, Any] = json.loads(self.get("/status"))["model"]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)

    def get(self, path: str) -> bytes:
        """Return the body of a GET request's response."""
        with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=30) as answer:
            body: bytes = answer.read()
            return body

    def rss(self) -> int:
        """Return the resident memory of the server process in bytes."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def _wait(self) -> float:
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.get("/ready")
                return time.perf_counter() - self.started
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with status {self.process.returncode}")
            time.sleep(0.02)

    async def ask(self, prompt: list[int], output_len: int) -> Answer:
        """Stream one completion and return its times."""
        fields = {"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
        answer = await self.stream("/v1/completions", fields)
        if answer.tokens != output_len:
            raise SystemExit(f"{answer.tokens} tokens arrived instead of {output_len}")
        return answer

    async def stream(self, path: str, fields: dict[str, Any]) -> Answer:
        """Stream one answer of completions or chats and return its times."""
        more = {"model": self.model["name"], "stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps(fields | more).encode()
        answer = Answer(time.perf_counter())
        reader, writer = await asyncio.open_connection(HOST, self.port)
        lines = (
            f"POST {path} HTTP/1.1",
            f"Host: {HOST}",
            "Content-Type: application/json",
            "Connection: close",
        )
        writer.write("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body)
        async for line in reader:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event.get("choices") and _says(event["choices"][0]):
                    answer.received.append(time.perf_counter())
                elif event.get("usage"):
                    answer.tokens = event["usage"]["completion_tokens"]
        writer.close()
        return answer


def _says(choice: dict[str, Any]) -> bool:
    """Return whether an event has something new; the first one of a chat comes before the first token."""
    if "token_ids" in choice:  # the frame of a call has tokens and no text
        return bool(choice["token_ids"])
    delta = choice.get("delta")
    return delta is None or any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))


def figures(answers: list[Answer], seconds: float) -> dict[str, float]:
    """Return the figures of some requests under the names that ``vllm bench serve`` uses."""
    ttfts = [1e3 * answer.ttft for answer in answers]
    itls = [1e3 * itl for answer in answers for itl in answer.itls]
    itls = itls or [math.nan]  # on a busy machine a short answer may be received as one event
    return {
        "completed": len(answers),
        "duration": seconds,
        "request_throughput": len(answers) / seconds,
        "output_throughput": sum(answer.tokens for answer in answers) / seconds,
        "median_ttft_ms": statistics.median(ttfts),
        "p99_ttft_ms": float(np.percentile(ttfts, 99)),
        "median_itl_ms": statistics.median(itls),
        "p99_itl_ms": float(np.percentile(itls, 99)),
    }


def prompt_of(length: int, vocab: int, seed: str) -> list[int]:
    """Return a prompt of random token ids."""
    generator = random.Random(seed)
    return [generator.randrange(vocab) for _ in range(length)]


async def concurrent(server: Server, clients: int, requests: int, lengths: tuple[int, int]) -> dict[str, float]:
    """Run `clients` clients, each of which sends its next request when its last one is answered; return the figures."""
    vocab = server.model["vocab_size"]
    prompts = iter([prompt_of(lengths[0], vocab, f"{clients} {number}") for number in range(requests)])
    answers: list[Answer] = []

    async def client() -> None:
        for prompt in prompts:
            answers.append(await server.ask(prompt, lengths[1]))

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return figures(answers, time.perf_counter() - start)


async def mixed(server: Server, output_len: int, prompt_len: int, pause: float) -> dict[str, float]:
    """Let clients decode while a long prompt arrives every `pause` seconds; return the figures of those clients."""
    vocab = server.model["vocab_size"]
    start = time.perf_counter()
    decoding = [
        asyncio.create_task(server.ask(prompt_of(16, vocab, f"d{i}"), output_len)) for i in range(MIXED_CLIENTS)
    ]
    arriving = []
    for number in range(ARRIVALS):
        await asyncio.sleep(pause)
        arriving.append(asyncio.create_task(server.ask(prompt_of(prompt_len, vocab, f"a{number}"), 4)))
    answers = await asyncio.gather(*decoding)
    decode_figures = figures(list(answers), time.perf_counter() - start)
    late = await asyncio.gather(*arriving)
    return decode_figures | {"arrivals_median_ttft_ms": statistics.median(1e3 * answer.ttft for answer in late)}


def read_seconds(model: Path) -> float:
    """Return the seconds to read all weights into a buffer, with the files in the page cache."""
    buffer = bytearray(READ_BLOCK)
    with Checkpoint.open(model) as checkpoint:
        shards = {checkpoint.shard_path(info.shard) for info in checkpoint.tensors.values()}
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for shard in shards:
            with open(shard, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        seconds = time.perf_counter() - start
    return seconds


def measure(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure one checkpoint, print each result at once, and return the record for JSON."""
    read = read_seconds(model)
    bare = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import minifloat.engine, minifloat.serve.server.app"], check=True)
    bare = time.perf_counter() - bare
    with Server(model, settings["threads"], settings["options"]) as server:
        at_start, info = server.rss(), server.model
        click.echo(
            f"\n{info['name']}: {info['runner']}, {info['scheme']}; ready after {server.ready:.2f} s, of which imports "
            f"{bare:.2f} and loading {info['load_seconds']:.2f}; reading the files {read:.2f} s "
            f"({info['load_seconds'] / read:.2f}x)"
        )
        runs: dict[str, dict[str, float]] = {}
        lengths = (settings["input_len"], settings["output_len"])
        asyncio.run(server.ask(prompt_of(lengths[0], info["vocab_size"], "warm"), 4))
        print_header()
        for clients in settings["concurrency"]:
            name = f"concurrency {clients}"
            runs[name] = asyncio.run(concurrent(server, clients, max(clients, settings["num_prompts"]), lengths))
            print_run(name, runs[name])
        runs["mixed"] = asyncio.run(
            mixed(server, settings["mixed_output_len"], settings["mixed_prompt"], settings["pause"])
        )
        print_run("mixed", runs["mixed"])
        after = server.rss()
    ratio = runs["mixed"]["p99_itl_ms"] / runs["mixed"]["median_itl_ms"]
    weights, cache = info["weight_bytes"], info["kv_bytes"]
    allowed = weights + cache + ALLOWED_BYTES
    click.echo(
        f"mixed: ITL p99 is {ratio:.2f}x its median ({verdict(ratio <= ALLOWED_ITL)}, at most {ALLOWED_ITL:.0f}x)\n"
        f"RSS {at_start / MEBI:,.0f} MiB when ready, {after / MEBI:,.0f} after the load, {allowed / MEBI:,.0f} allowed "
        f"(weights {weights / MEBI:,.0f} + KV cache {cache / MEBI:,.0f} + 700): "
        f"{verdict(max(at_start, after) <= allowed)}"
    )
    facts = {"ready_seconds": server.ready, "read_seconds": read, "import_seconds": bare}
    return {"model": info, "rss_ready": at_start, "rss_after": after, "allowed": allowed, "runs": runs} | facts


def verdict(good: bool) -> str:
    """Return the word for a bar that is reached or missed."""
    return "pass" if good else "SHORT"


def print_header() -> None:
    """Print the header of the table of runs."""
    click.echo(
        f"{'load':<16} {'requests':>8} {'out tok/s':>10} {'TTFT p50 ms':>12} {'p99':>8} {'ITL p50 ms':>11} {'p99':>8}"
    )


def print_run(name: str, run: dict[str, float]) -> None:
    """Print one row of the table of runs."""
    click.echo(
        f"{name:<16} {run['completed']:>8.0f} {run['output_throughput']:>10.1f} {run['median_ttft_ms']:>12.1f} "
        f"{run['p99_ttft_ms']:>8.1f} {run['median_itl_ms']:>11.2f} {run['p99_itl_ms']:>8.2f}"
    )


@click.command(help=__doc__.split("\n")[0])
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1), help="Threads of the server.")
@click.option("--concurrency", default="1,8,32", show_default=True)
@click.option("--num-prompts", default=4, show_default=True, help="Number of requests; at least the concurrency.")
@click.option("--input-len", default=128, show_default=True)
@click.option("--output-len", default=64, show_default=True)
@click.option("--mixed-output-len", default=128, show_default=True)
@click.option("--mixed-prompt", default=256, show_default=True, help="Tokens of the long prompts.")
@click.option("--pause", default=0.5, show_default=True, help="Seconds between arrivals in the mixed load.")
@click.option("--option", "options", multiple=True, help="Option of `minifloat serve`, as in --option=--lm-head=fp8.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(models: tuple[Path, ...], concurrency: str, json_path: Path | None, **settings: Any) -> None:
    """Measure a server for each of the checkpoints MODELS."""
    bound_spin()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    facts = instruction_sets.machine(settings["threads"])
    click.echo(instruction_sets.describe(facts))
    settings["concurrency"] = [int(clients) for clients in concurrency.split(",")]
    results = [measure(model, settings) for model in models]
    if json_path:
        json_path.write_text(json.dumps({"machine": facts, "settings": settings, "results": results}, indent=1))


if __name__ == "__main__":
    main()
