"""A child process with its process group, which does not outlive its parent.

The child leads its own session: Ctrl-C at the terminal reaches only this process, which then stops the child in order,
and all processes that the child starts can be killed with it. On Linux the child gets SIGTERM even if this process is
killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

import psutil

from minifloat.errors import UsageError
from minifloat.serve.vllm.command import Command
from minifloat.serve.vllm.log import Log

_CHUNK = 1 << 16
#: Seconds in which the last output of a dead child is read, since an escaped descendant may keep the pipe open.
_LAST_OUTPUT_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


class Child:
    """A running command."""

    def __init__(self, command: Command, log: Log, show: BinaryIO | None, changed: Callable[[], None]) -> None:
        self.log = log
        self._show, self._changed, self._killed = show, changed, False
        try:
            self._process = subprocess.Popen(
                command.argv,
                env=command.full_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )
        except OSError as error:
            raise UsageError(f"{command.argv[0]}: cannot be started: {error.strerror}") from error
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read_output, name="vllm-output", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name="vllm-end", daemon=True)
        self._reader.start()
        self._waiter.start()

    @property
    def returncode(self) -> int | None:
        """Exit status; None while the child runs; the negative number of the signal that killed it."""
        return self._process.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the child and all its descendants. A second call does nothing."""
        if self._killed:
            return
        self._killed = True
        strays = _descendants(self.pid) if self.returncode is None else []
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for stray in strays:  # includes descendants in other sessions
            with contextlib.suppress(psutil.Error):
                stray.kill()
        self._waiter.join()
        self._reader.join(_LAST_OUTPUT_SECONDS)

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while chunk := os.read(descriptor, _CHUNK):
            num_found = self.log.num_found
            self._pass_on(b"".join(self.log.feed(chunk)))
            if self.log.num_found > num_found:
                self._changed()
        self._pass_on(self.log.end())

    def _pass_on(self, lines: bytes) -> None:
        """Show lines. If the reader has gone, drop them, so that the child can still write."""
        if self._show is None:
            return
        try:
            self._show.write(lines)
            self._show.flush()
        except (OSError, ValueError):
            _discard(self._show)
            self._show = None

    def _wait(self) -> None:
        self._process.wait()
        self._changed()


def _discard(stream: BinaryIO) -> None:
    """Let what a stream still holds go nowhere: otherwise the interpreter fails to flush it at its end, status 120."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def _end_with_parent() -> Callable[[], None] | None:
    """Return a function for the child on Linux: it requests SIGTERM for when the thread that started it ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork, after which taking a lock may hang

    def request_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    return request_signal
