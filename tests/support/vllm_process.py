"""Starts `minifloat serve --engine vllm` as a process and watches it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
#: Seconds to wait for an event that must come: long enough for a machine whose processors are busy with other work.
PATIENCE = 120.0
_KEPT_CHARACTERS = 1 << 17


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Wait until a condition is true and return its value."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return value


class Serving:
    """A process of `minifloat serve --engine vllm`, with its output.

    Args:
        folder: Where the fake vLLM writes its files.
        port: TCP port to serve on.
        program: Arguments of Python that run the command line.
        options: Options of `minifloat serve`.
        env: Environment variables to add.
        leaves_at: Text at which this test stops reading the output and closes the pipe; None: it reads to the end.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        program: tuple[str, ...],
        options: list[str],
        env: dict[str, str],
        leaves_at: str | None = None,
    ) -> None:
        self.folder, self.port, self._leaves_at = folder, port, leaves_at
        self._head, self._tail = "", ""
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", "--engine", "vllm", "--port", str(port), *options],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "FAKE_DIR": str(folder), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        # Only this thread reads and closes the pipe: closing it elsewhere would race with os.read.
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                text = self._tail + chunk.decode(errors="replace")
                room = _KEPT_CHARACTERS - len(self._head)
                self._head, self._tail = self._head + text[:room], text[room:][-_KEPT_CHARACTERS:]
                if self._leaves_at is not None and self._leaves_at in self.output:
                    return

    @property
    def output(self) -> str:
        """The output so far; of more than 256 KB, the first and the last 128 KB."""
        return self._head + self._tail

    def until(self, text: str) -> None:
        """Wait until the output holds a text that stands near its beginning or its present end."""
        wait_for(lambda: text in self.output or self.process.poll() is not None, text)
        if self.process.poll() is not None:
            self._reader.join(PATIENCE)
        assert text in self.output, self.output

    def wait_until_left(self) -> None:
        """Wait until the output is no longer read: `leaves_at` was seen, or the output has ended."""
        self._reader.join(PATIENCE)
        assert not self._reader.is_alive(), f"waited in vain for {self._leaves_at}"

    def noted(self, name: str) -> Any:
        """Wait for a JSON file of the fake vLLM and return its content."""
        return json.loads(wait_for((self.folder / name).exists, name) and (self.folder / name).read_text())

    @property
    def pids(self) -> list[int]:
        """Process ids of the fake vLLM and its worker."""
        wait_for((self.folder / "pids").exists, "the fake")
        return [int(pid) for pid in (self.folder / "pids").read_text().split()]

    def end(self) -> int:
        """Wait for the end of the process and of its children. Return the exit status."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        if (self.folder / "pids").exists():
            wait_for(lambda: not any(map(is_alive, self.pids)), "the children's end")
        return status


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
