"""Runs `minifloat serve` as a process and talks to it with OpenAI's client."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
from tools import ROOT, environment, has_amx, python_of

#: Seconds until vLLM must be ready, on two busy processors.
_START_SECONDS = 420.0
_STOP_SECONDS = 60.0
_NAME = "served"
#: This machine, as `check` names it.
HARDWARE = "cpu" if has_amx() else "cpu-no-amx"


class Served:
    """A running server."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url, self.process, self.log = f"http://127.0.0.1:{port}", process, log
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=300, max_retries=0)

    @property
    def output(self) -> str:
        """The output so far."""
        return self.log.read_text(errors="replace")

    def complete(self, prompt: Sequence[int], tokens: int, logprobs: int = 5, **more: Any) -> Any:
        """Return the choice of a greedy completion."""
        answer = self.client.completions.create(
            model=_NAME, prompt=list(prompt), max_tokens=tokens, temperature=0, logprobs=logprobs, extra_body=more
        )
        return answer.choices[0]

    def stop(self) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_STOP_SECONDS)


def vllm_options() -> list[str]:
    """Return the options of `minifloat serve` with vLLM in its environment of the tests."""
    return ["--engine", "vllm", "--vllm-python", python_of("vllm"), "--hardware", HARDWARE, "--max-model-len", "256"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(model: Path, log: Path, *options: str, arguments: Sequence[str] = (), **variables: str) -> Iterator[Served]:
    """Run `minifloat serve MODEL OPTIONS -- ARGUMENTS` until the end of the block."""
    port = free_port()
    process = start(model, port, log, *options, arguments=arguments, **variables)
    try:
        wait_until_ready(port, process, log)
        yield Served(port, process, log)
    finally:
        end(process)


def start(
    model: Path, port: int, log: Path, *options: str, arguments: Sequence[str] = (), **variables: str
) -> subprocess.Popen[bytes]:
    """Start `minifloat serve` and return the process."""
    command = [sys.executable, "-m", "minifloat", "serve", str(model), "--port", str(port)]
    command += ["--served-model-name", _NAME, *options, *(["--", *arguments] if arguments else [])]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment(PYTHONPATH=str(ROOT / "src"), **variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers /health."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, f"ended with {process.returncode}:\n{log.read_text(errors='replace')[-4000:]}"
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply,
        ):
            if reply.status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"not ready in time:\n{log.read_text(errors='replace')[-4000:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process, and kill it if it does not end."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
