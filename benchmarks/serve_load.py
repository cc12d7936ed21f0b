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
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil
from serve_process import HOST, free_port

STORYBOOK = Path(__file__).parents[1] / "examples" / "storybook-4m"
BEGINNINGS = ("Once upon a time", "The little dog", "One day, a girl", "In the forest", "Tom and Lily", "The sun was")
ENDINGS = ("", " there was", " wanted to", " said that", " had a big", " went to the")
PROMPTS = [beginning + ending for beginning in BEGINNINGS for ending in ENDINGS]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
#: Share of each kind of request.
KINDS = {"whole": 35, "streamed": 35, "chat": 10, "several": 5, "leaves": 10, "wrong": 5}

#: Kinds of clients that send or read in small pieces with pauses; what they ask for is a streamed answer.
SLOW = ("slow sender", "slow reader")
_PAUSE = 0.05


@dataclass
class Tally:
    """The results of all requests.

    Attributes:
        done: Number of finished requests by kind.
        refused: Number of answers with status 503.
        problems: Descriptions of wrong answers and failures.
        seconds: Time of the last attempt of each served request.
    """

    done: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Load:
    """A client that sends random requests and checks the answers.

    Args:
        port: Port of the server.
        seed: Seed of the mixture.

    Attributes:
        stops: Number of times that the server was told to stop: a request that was sent before, and got no byte of an
            answer, is sent again.
        is_stopping: Whether it is stopped or starts at this time.
    """

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.random, self.tally = port, random.Random(seed), Tally()
        self.stops = 0
        self.is_stopping = False
        self.expected: dict[tuple[str, int], str] = {}

    async def learn(self, lengths: range) -> None:
        """Record the expected answer of each prompt at each length, with one request at a time."""
        for prompt in PROMPTS:
            for tokens in lengths:
                body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
                status, _, answer = await self.ask("/v1/completions", body)
                assert status == 200, answer
                self.expected[prompt, tokens] = json.loads(answer)["choices"][0]["text"]

    async def request(self, kind: str) -> None:
        """Send one request, again after every 503, and check its answer."""
        prompt, tokens = self.random.choice(list(self.expected))
        body: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        body |= {"messages": [{"role": "user", "content": prompt}]} if kind == "chat" else {"prompt": prompt}
        body |= {"stream": True} if kind in ("streamed", "leaves", *SLOW) else {"n": 3} if kind == "several" else {}
        if kind == "leaves":
            body["max_tokens"] = 200
        if kind == "wrong":
            body[self.random.choice(["temperature", "n", "best_of", "nonsense"])] = "wrong"
        while True:
            began = time.perf_counter()
            status, headers, answer = await self._ask_until_answered(kind, path, body)
            if status != 503:
                break
            self.tally.refused += 1
            if "retry-after" not in headers:
                self.tally.problems.append("503 without Retry-After")
            await asyncio.sleep(float(headers.get("retry-after", 1)) * self.random.uniform(0.5, 1.5))
        self.tally.done[kind] += 1
        if status == 200 and kind != "leaves":
            self.tally.seconds.append(time.perf_counter() - began)
        self._judge(kind, status, answer, self.expected[prompt, tokens])

    def _judge(self, kind: str, status: int, answer: str, expected: str) -> None:
        if status != (400 if kind == "wrong" else 200):
            self.tally.problems.append(f"{kind}: {status} {answer[:200]}")
        elif kind in ("whole", "several"):
            texts = [choice["text"] for choice in json.loads(answer)["choices"]]
            if texts != [expected] * (3 if kind == "several" else 1):
                self.tally.problems.append(f"{kind}: {texts} instead of {expected!r}")
        elif kind == "chat":
            if json.loads(answer)["choices"][0]["message"]["content"] != expected:
                self.tally.problems.append(f"chat: {answer[:300]} instead of {expected!r}")
        elif kind == "streamed" or kind in SLOW:
            events = [line.removeprefix("data: ") for line in answer.split("\n\n") if line]
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
            if events[-1] != "[DONE]" or text != expected:
                self.tally.problems.append(f"streamed: {text!r} instead of {expected!r}")

    async def _ask_until_answered(self, kind: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], str]:
        """Ask again as long as the server is stopped or starts, which `stops` tells."""
        while True:
            stops = self.stops
            try:
                return await self.ask(path, body, leave=kind == "leaves", slow=kind if kind in SLOW else "")
            except ConnectionError:
                if not self.stops:
                    raise
                await asyncio.sleep(0.2)
            except asyncio.IncompleteReadError as error:
                if stops == self.stops and not self.is_stopping:
                    self.tally.problems.append(f"{kind}: the connection ended without an answer: {error.partial!r}")
                    return 0, {}, ""
                await asyncio.sleep(0.2)

    async def ask(
        self, path: str, body: dict[str, Any], *, leave: bool = False, slow: str = ""
    ) -> tuple[int, dict[str, str], str]:
        """Return status, headers and body; with `leave`, disconnect at the first token; `slow` is one of `SLOW`."""
        data = json.dumps({"model": "loaded"} | body).encode()
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode())
            pieces = [data[i : i + 8] for i in range(0, len(data), 8)] if slow == "slow sender" else [data]
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(_PAUSE if len(pieces) > 1 else 0)
            top = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in top[1:])}
            status = int(top[0].split()[1])
            if leave and status == 200:
                return status, headers, (await reader.read(64)).decode()
            received = b""
            while piece := await reader.read(64 if slow == "slow reader" else -1):
                received += piece
                await asyncio.sleep(_PAUSE if slow == "slow reader" else 0)
            return status, headers, (_unchunked(received) if "transfer-encoding" in headers else received).decode()
        finally:
            writer.close()


def _unchunked(data: bytes) -> bytes:
    pieces = []
    while data:
        size, _, data = data.partition(b"\r\n")
        pieces.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(pieces)


async def run(port: int, requests: int, clients: int, seed: int) -> Load:
    """Record the expected answers, then send all requests."""
    load = Load(port, seed)
    await load.learn(range(4, 25, 10))
    kinds = load.random.choices(list(KINDS), list(KINDS.values()), k=requests)

    async def client() -> None:
        while kinds:
            await load.request(kinds.pop())

    await asyncio.gather(*(client() for _ in range(clients)))
    return load


def start(model: Path, port: int, running: int, waiting: int, folder: str) -> subprocess.Popen[bytes]:
    """Start `minifloat serve` and return its process once it is ready."""
    template = Path(folder) / "template.jinja"
    template.write_text(TEMPLATE)
    options = {
        "port": port,
        "served-model-name": "loaded",
        "dtype": "float32",
        "max-num-seqs": running,
        "max-num-queued-reqs": waiting,
        "chat-template": template,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    process = subprocess.Popen([sys.executable, "-m", "minifloat", "serve", str(model), *arguments, "--quiet"])
    while process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return process
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def work_of(port: int) -> dict[str, Any]:
    """Return what the server says of its work now."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/status") as answer:
        now: dict[str, Any] = json.load(answer)["now"]
    return now


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
