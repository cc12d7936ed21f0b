"""Processes that run llguidance (`worker.py`), and the thread that reads their answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minifloat.engine.grammar import worker
from minifloat.errors import KernelUnavailable

_LOG = logging.getLogger(__name__)
_WORKER = Path(worker.__file__)
#: Seconds that the first process has to end in after its connection is closed.
_PATIENCE = 5.0


class Forker:
    """The process that has read the tokenizer, and forks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._control, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_WORKER), str(descriptor)],
                    pass_fds=(descriptor,),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                self._control.close()
                raise KernelUnavailable(
                    f"JSON output needs a process of its own, which does not start: {error}"
                ) from error
        try:
            worker.send_frame(self._control, json.dumps(settings).encode())
            problem = worker.receive_frame(self._control).decode()
        except (OSError, EOFError):
            problem = "its process has ended"
        if problem:
            self.close()
            raise KernelUnavailable(f"JSON output is not possible with this tokenizer: {problem}")

    def fork(self) -> tuple[int, int, socket.socket]:
        """Return number, process id and connection of a new process."""
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [worker.CONTROL.pack(worker.FORK, number)], [theirs.fileno()])
                return number, self._answer(), ours
            except (OSError, EOFError):
                ours.close()
                raise

    def end(self, number: int) -> int:
        """End a process, and return its exit status, negative if a signal has ended it."""
        with self._lock, contextlib.suppress(OSError, EOFError):
            self._control.sendall(worker.CONTROL.pack(worker.END, number))
            return self._answer()
        return -signal.SIGKILL

    def _answer(self) -> int:
        (answer,) = worker.ANSWER.unpack(worker.receive_exactly(self._control, worker.ANSWER.size))
        return int(answer)

    def close(self) -> None:
        """End the process and those that it has forked."""
        self._control.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Reader:
    """A thread that reads messages of connections, and does what other threads leave to it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="minifloat-grammars", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], None] | None) -> None:
        """Let the thread call a function; None: end the thread."""
        self._work.put(work)
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def read(self, connection: socket.socket, receive: Callable[[bytes | None], None]) -> None:
        """Begin to read a connection."""
        self.do(lambda: self._register(connection, receive))

    def _register(self, connection: socket.socket, receive: Callable[[bytes | None], None]) -> None:
        if connection.fileno() >= 0:
            self._selector.register(connection, selectors.EVENT_READ, receive)

    def stop(self, connection: socket.socket) -> None:
        """Close a connection; called in the thread."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def close(self) -> None:
        """End the thread."""
        self.do(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    if not self._do_work():
                        break
                    continue
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection.fileno() >= 0:  # the work before it may have closed it
                    self._receive(connection, key.data)
            else:
                continue
            break
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _receive(self, connection: socket.socket, receive: Callable[[bytes | None], None]) -> None:
        message = None
        try:
            message = worker.receive_frame(connection)
        except (OSError, EOFError):
            self.stop(connection)
        _call(lambda: receive(message))

    def _do_work(self) -> bool:
        """Call what was left to the thread; False: the thread is to end."""
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        with contextlib.suppress(queue.Empty):
            while True:
                work = self._work.get_nowait()
                if work is None:
                    return False
                _call(work)
        return True


def _call(work: Callable[[], None]) -> None:
    """Call a function whose failure must not end the thread."""
    try:
        work()
    except Exception:
        _LOG.exception("a grammar's process is not served any more")
