"""Servers in processes of their own, clients that chat with them, and what the Python of `minifloat serve` costs.

The parts of `serve.py` and `agents.py`. As a script this file is minifloat's command line, which also appends samples
of its cost to a file: `python benchmarks/serve_process.py SAMPLES serve MODEL ...`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

HOST = "127.0.0.1"
#: Tokens of prompt and answer of chats: the first 64 requests of Azure's trace of conversations of 2023 whose prompts
#: have at most 512 tokens, as 39% of its prompts do. Source: data/AzureLLMInferenceTrace_conv.csv of
#: https://github.com/Azure/AzurePublicDataset (CC BY 4.0), described in Patel et al., "Splitwise", ISCA 2024.
CHATS = (
    *((374, 44), (396, 109), (91, 16), (91, 16), (381, 84), (388, 84), (242, 14), (209, 152), (394, 124), (394, 59)),
    *((389, 90), (415, 106), (120, 12), (369, 74), (206, 162), (197, 152), (181, 154), (388, 54), (203, 147)),
    *((126, 194), (389, 87), (91, 16), (181, 123), (191, 217), (27, 183), (203, 217), (398, 81), (126, 172)),
    *((209, 181), (209, 181), (28, 175), (437, 88), (181, 104), (203, 138), (200, 177), (91, 16), (382, 64)),
    *((412, 102), (194, 217), (203, 217), (200, 217), (64, 174), (458, 123), (378, 58), (91, 16), (389, 89)),
    *((212, 183), (407, 131), (396, 82), (203, 217), (181, 253), (320, 18), (124, 157), (400, 102), (203, 162)),
    *((2, 93), (372, 60), (380, 102), (42, 167), (126, 203), (431, 84), (206, 179), (400, 91), (163, 224)),
)
#: Tokens of the prompt of each client's first request, which only brings the clients out of step.
_FIRST_PROMPT = 16
_SAMPLE_SECONDS = 0.25
_PAUSE_AFTER_FAILURE = 0.2


class RequestFailed(Exception):
    """A request was refused, or its answer is not what was asked for."""


@dataclass
class Answer:
    """The times of one request, in seconds of `time.perf_counter`.

    Attributes:
        sent: When the request was sent.
        tokens: Number of generated tokens; 0 before the answer ends.
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
        return [after - before for before, after in pairwise(self.received)]


class ServerProcess:
    """A server in a process of its own. A context manager.

    Args:
        command: The command, without the port.
        ready_path: The path that answers with status 200 once the server is ready.
        fields: Fields of every request.
        vocab: Size of the vocabulary that random prompts are drawn from.
    """

    def __init__(self, command: Sequence[str], ready_path: str, fields: dict[str, Any], vocab: int) -> None:
        self.port, self.fields, self.vocab = free_port(), fields, vocab
        self.started = time.perf_counter()
        self.process = subprocess.Popen([*command, "--port", str(self.port)])
        while not self._answers(ready_path):
            if self.process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with status {self.process.returncode}")
            time.sleep(0.02)
        self.ready = time.perf_counter() - self.started

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def get(self, path: str) -> bytes:
        """Return the body of a GET request's response."""
        with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=30) as answer:
            body: bytes = answer.read()
            return body

    def rss(self) -> int:
        """Return the resident memory of the server process in bytes."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def own_cost(self, start: float, end: float) -> dict[str, float]:
        """Return what the server costs beside its model between two times; empty where that is not measured."""
        return {}

    def _answers(self, path: str) -> bool:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            self.get(path)
            return True
        return False

    async def ask(self, prompt: list[int], output_len: int, answer: Answer | None = None) -> Answer:
        """Stream one greedy completion of `output_len` tokens and return its times."""
        fields = {"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
        answer = await self.stream("/v1/completions", fields, answer)
        if answer.tokens != output_len:
            raise RequestFailed(f"{answer.tokens} tokens arrived instead of {output_len}")
        return answer

    async def stream(self, path: str, fields: dict[str, Any], answer: Answer | None = None) -> Answer:
        """Stream one answer of completions or chats and return its times, which `answer` has as they are known."""
        more = {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps(fields | more | self.fields).encode()
        answer = answer or Answer(time.perf_counter())
        reader, writer = await asyncio.open_connection(HOST, self.port)
        lines = (
            f"POST {path} HTTP/1.1",
            f"Host: {HOST}",
            "Content-Type: application/json",
            "Connection: close",
        )
        try:
            writer.write("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body)
            status = await reader.readline()
            if status.split()[1:2] != [b"200"]:
                raise RequestFailed(f"{status.decode().strip()}: {(await reader.read()).decode()[-300:]}")
            async for line in reader:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RequestFailed(str(event["error"]))
                    if event.get("choices") and _says(event["choices"][0]):
                        answer.received.append(time.perf_counter())
                    if event.get("usage"):
                        answer.tokens = event["usage"]["completion_tokens"]
        finally:
            writer.close()
        return answer


class Server(ServerProcess):
    """`minifloat serve`.

    Attributes:
        model: What the server says of its model.
    """

    def __init__(self, model: Path, threads: int, options: Sequence[str]) -> None:
        with tempfile.NamedTemporaryFile(prefix="serving-", delete=False) as file:
            self._samples = Path(file.name)
        command = [sys.executable, __file__, str(self._samples), "serve", str(model), "--quiet"]
        super().__init__([*command, "--threads", str(threads), *options], "/ready", {}, 0)
        self.model: dict[str, Any] = json.loads(self.get("/status"))["model"]
        self.fields, self.vocab = {"model": self.model["name"]}, self.model["vocab_size"]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._samples.unlink()

    def own_cost(self, start: float, end: float) -> dict[str, float]:
        """Return processor seconds of Python threads outside native steps, and wall time outside them, per second."""
        samples = [json.loads(line) for line in self._samples.read_text().splitlines()]
        inside = [sample for sample in samples if start <= sample["at"] < end]
        if len(inside) < 2:
            return {}
        first, last = inside[0], inside[-1]
        seconds = last["at"] - first["at"]
        steps = last["in_steps"] - first["in_steps"]
        return {"own_cpu": (last["own_cpu"] - first["own_cpu"]) / seconds, "outside_steps": 1 - steps / seconds}


def llama_command(binary: Path, gguf: Path, *, threads: int, slots: int, context: int) -> list[str]:
    """Return the command of llama.cpp's server with as many slots as clients, each of `context` tokens.

    A slot keeps what its next prompt begins with; copies of slots in memory (`--cache-ram`) would cost time and save
    none. The sampler is the cheapest one that is greedy.
    """
    options = {
        "model": gguf,
        "threads": threads,
        "threads-batch": threads,
        "parallel": slots,
        "ctx-size": slots * context,
        "flash-attn": "on",
        "cache-ram": 0,
        "samplers": "top_k",
        "top-k": 1,
        "log-verbosity": 1,
    }
    return [str(binary), "--no-webui", *(text for name, value in options.items() for text in (f"--{name}", str(value)))]


def _says(choice: dict[str, Any]) -> bool:
    """Return whether an event has something new; the first one of a chat comes before the first token."""
    if "token_ids" in choice:  # the frame of a call has tokens and no text
        return bool(choice["token_ids"])
    said = choice.get("delta", choice)
    return any(said.get(name) for name in ("text", "content", "reasoning_content", "tool_calls"))


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def prompt_of(length: int, vocab: int, seed: str) -> list[int]:
    """Return a prompt of random token ids."""
    generator = random.Random(seed)
    return [generator.randrange(vocab) for _ in range(length)]


async def chats(server: ServerProcess, clients: int, seconds: float, prefix: int) -> dict[str, float]:
    """Let clients chat, each of which sends its next request when its last one is answered; return the figures.

    The first request of a client is short and is answered with a part of a chat's tokens, so that the clients are out
    of step when the time begins, which is when all of them receive. All prompts begin with the same `prefix` tokens.
    """
    shared = prompt_of(prefix, server.vocab, "shared")
    answers: list[Answer] = []
    failures: list[str] = []

    async def client(number: int) -> None:
        generator = random.Random(f"{clients} {number}")
        length, output_len = _FIRST_PROMPT, generator.randint(2, generator.choice(CHATS)[1])
        while True:
            prompt = shared + [generator.randrange(server.vocab) for _ in range(length)]
            answers.append(Answer(time.perf_counter()))
            try:
                await server.ask(prompt, output_len, answers[-1])
            except (RequestFailed, OSError) as error:
                failures.append(f"{error!r}")
                await asyncio.sleep(_PAUSE_AFTER_FAILURE)
            length, output_len = generator.choice(CHATS)

    await server.ask([*shared, 0], 2)  # the prefix is in the cache before anyone asks for it
    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    try:
        while not failures and sum(bool(answer.received) for answer in answers) < clients:
            await asyncio.sleep(0.01)
        if failures:
            raise SystemExit(f"a request failed before the time began: {failures[0]}")
        start, client_cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(seconds)
        end, client_cpu = time.perf_counter(), time.process_time() - client_cpu
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    found = figures(answers, start, end) | {"failed": len(failures), "client_cpu": client_cpu / (end - start)}
    return found | server.own_cost(start, end)


def figures(answers: Sequence[Answer], start: float, end: float) -> dict[str, float]:
    """Return the figures of the events between two times, under the names that ``vllm bench serve`` uses.

    An event has one token, or several where a character or a slow reader joins them: the answers that are finished say
    how many there are on average. A request without a token counts with the time that it has waited.
    """
    whole = [answer for answer in answers if answer.tokens and answer.received]
    per_event = sum(answer.tokens for answer in whole) / max(1, sum(len(answer.received) for answer in whole))
    events = sum(start <= at < end for answer in answers for at in answer.received)
    asked = [answer for answer in answers if start <= answer.sent < end]
    ttfts = [1e3 * (min([*answer.received[:1], end]) - answer.sent) for answer in asked] or [float("nan")]
    itls = [
        1e3 * (after - before)
        for answer in answers
        for before, after in pairwise(answer.received)
        if start <= before and after < end
    ] or [float("nan")]
    return {
        "completed": sum(start <= answer.received[-1] < end for answer in whole),
        "duration": end - start,
        "output_throughput": events * (per_event or 1.0) / (end - start),
        "median_ttft_ms": statistics.median(ttfts),
        "p99_ttft_ms": float(np.percentile(ttfts, 99)),
        "median_itl_ms": statistics.median(itls),
        "p99_itl_ms": float(np.percentile(itls, 99)),
    }


def _sampling(call: Callable[..., None], path: str) -> Callable[..., None]:
    """Return `Library.call` that also appends the time in native steps, and that of Python threads, to a file."""
    file = open(path, "a", buffering=1)  # noqa: SIM115  (as long as the process)
    in_steps = cpu_in_steps = written = 0.0

    def sampled(library: object, name: str, args: object) -> None:
        nonlocal in_steps, cpu_in_steps, written
        wall, cpu = time.perf_counter(), time.thread_time()
        call(library, name, args)
        if name != "step":
            return
        now = time.perf_counter()
        in_steps, cpu_in_steps = in_steps + now - wall, cpu_in_steps + time.thread_time() - cpu
        if now - written >= _SAMPLE_SECONDS:
            written = now
            clocks = [time.pthread_getcpuclockid(each.ident) for each in threading.enumerate() if each.ident]
            own = sum(map(time.clock_gettime, clocks)) - cpu_in_steps
            file.write(json.dumps({"at": now, "in_steps": in_steps, "own_cpu": own}) + "\n")

    return sampled


if __name__ == "__main__":
    from minifloat.commands.main import main
    from minifloat.kernels.native import Library

    samples = sys.argv.pop(1)
    with patch.object(Library, "call", _sampling(Library.call, samples)):
        main()
