"""`minifloat serve --engine vllm` as a process of its own, and a way to watch it."""

from __future__ import annotations

import contextlib
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
#: For what should take a moment, on a machine that does much else.
PATIENCE = 120.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of a condition."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return value


class Serving:
    """`minifloat serve --engine vllm` as a process of its own, with what it writes."""

    def __init__(self, folder: Path, port: int, program: tuple[str, ...], options: list[str], env: dict[str, str]):
        self.folder, self.port, self._text = folder, port, ""
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", "--engine", "vllm", "--port", str(port), *options],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "FAKE_DIR": str(folder), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # a test has closed it
            while chunk := os.read(self.process.stdout.fileno(), 1 << 16):
                self._text = (self._text + chunk.decode(errors="replace"))[-(1 << 17) :]

    @property
    def output(self) -> str:
        """The last of what it wrote."""
        return self._text

    def until(self, text: str) -> None:
        """Wait for a line."""
        wait_for(lambda: text in self._text or self.process.poll() is not None, text)
        assert text in self._text, self._text

    def saw(self, name: str) -> Any:
        """What the fake noted."""
        return json.loads(wait_for((self.folder / name).exists, name) and (self.folder / name).read_text())

    @property
    def pids(self) -> list[int]:
        """The fake and its worker."""
        wait_for((self.folder / "pids").exists, "the fake")
        return [int(pid) for pid in (self.folder / "pids").read_text().split()]

    def end(self) -> int:
        """The exit status, and nothing left behind."""
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
