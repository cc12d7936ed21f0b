"""One child process with its process group: started, listened to, stopped, and never left behind.

The child is the leader of a session of its own: Ctrl-C at the terminal reaches this process alone, which then tells the
child in an orderly way; and whatever the child has started can be killed with it. On Linux the child is told to stop
also where this process is killed.
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
#: Seconds in which what a dead child wrote last is still read; a descendant that got away may keep the pipe open.
_LAST_OUTPUT = 5.0
_PR_SET_PDEATHSIG = 1


class Child:
    """A running command.

    Args:
        command: What to run.
        log: What its output is told to.
        show: Where its output goes; None: nowhere.
        changed: Called from other threads when its log has told something new, and when it has ended.

    Raises:
        UsageError: It cannot be started.
    """

    def __init__(self, command: Command, log: Log, show: BinaryIO | None, changed: Callable[[], None]) -> None:
        self.log, self.name = log, command.name
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
                preexec_fn=_dying_with_parent(),
            )
        except OSError as error:
            raise UsageError(f"{command.argv[0]}: cannot be started: {error.strerror}") from error
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name="vllm-output", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name="vllm-end", daemon=True)
        self._reader.start()
        self._waiter.start()

    @property
    def returncode(self) -> int | None:
        """None while it runs; of a child that was killed, the signal's number below zero."""
        return self._process.returncode

    def terminate(self) -> None:
        """Ask it to stop."""
        self._process.terminate()

    def kill(self) -> None:
        """End it and everything that it has started; nothing where that is done."""
        if self._killed:
            return
        self._killed = True
        strays = _descendants(self.pid) if self.returncode is None else []
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for stray in strays:  # those that have made a session of their own
            with contextlib.suppress(psutil.Error):
                stray.kill()
        self._waiter.join()
        self._reader.join(_LAST_OUTPUT)

    def _read(self) -> None:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while chunk := os.read(descriptor, _CHUNK):
            known = self.log.told
            self._pass_on(b"".join(self.log.feed(chunk)))
            if self.log.told > known:
                self._changed()
        self._pass_on(self.log.end())

    def _pass_on(self, lines: bytes) -> None:
        """Show lines; where nobody reads any longer, the child must still be able to write."""
        if self._show is None:
            return
        try:
            self._show.write(lines)
            self._show.flush()
        except (OSError, ValueError):
            self._show = None

    def _wait(self) -> None:
        self._process.wait()
        self._changed()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def _dying_with_parent() -> Callable[[], None] | None:
    """What a child on Linux does first: have itself sent SIGTERM when the thread that started it is no more."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # found before the fork, after which only what waits for no lock is safe

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    return ask
