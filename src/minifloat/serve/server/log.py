"""The log of a server, which never holds the server up and which nobody can flood.

A pipe that nobody reads is full after 64 KiB, and the next write to it waits. Lines are therefore queued, and a thread
writes them: if the queue is full, lines are dropped and counted. Warnings that clients can cause as often as they like
are written a few times, then counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator

#: Lines that wait to be written.
_QUEUE_LINES = 4096
#: Seconds in which a warning may be repeated `_REPEATS` times.
_PERIOD_SECONDS = 10.0
_REPEATS = 5
#: Number of different warnings that are counted; more begin anew.
_MAX_KINDS = 256
#: Seconds for the last lines, when the server ends.
_LAST_LINES_SECONDS = 1.0
_FORMAT = "%(asctime)s %(levelname)s %(message)s"


class RepeatFilter(logging.Filter):
    """Drops warnings and errors that repeat themselves, and says how many were dropped when one is written again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind = (record.name, record.levelno, str(record.msg).partition("\n")[0])
        now = self._clock()
        began, count = self._seen.get(kind, (now, 0))
        if now - began >= _PERIOD_SECONDS:
            if count > _REPEATS:
                record.msg = f"{record.getMessage()} ({count - _REPEATS} more like it in the last {now - began:.0f} s)"
                record.args = None
            began, count = now, 0
        if len(self._seen) >= _MAX_KINDS and kind not in self._seen:
            self._seen.clear()
        self._seen[kind] = (began, count + 1)
        return count < _REPEATS


class DroppingHandler(logging.Handler):
    """Writes lines to a descriptor in a thread of its own, and drops them where nobody reads them."""

    def __init__(self, descriptor: int, lines: int = _QUEUE_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(lines)
        self.dropped = 0
        # A thread takes no part in the locks of `logging.shutdown`: a full pipe does not stop the process from ending.
        self._thread = threading.Thread(target=self._write, name="minifloat-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            line = f"a record of {record.name} cannot be formatted: {record.msg!r}"
        try:
            self._lines.put_nowait(line + "\n")
        except queue.Full:
            self.dropped += 1

    def end(self, seconds: float = _LAST_LINES_SECONDS) -> None:
        """Write the lines that wait, for at most so many seconds."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=seconds)
        self._thread.join(seconds)

    def _write(self) -> None:
        reported = 0
        while (line := self._lines.get()) is not None:
            dropped = self.dropped
            if dropped > reported:
                line += f"{dropped - reported} lines of the log were dropped, because nobody read it\n"
            try:
                self._write_all(line.encode(errors="backslashreplace"))
                reported = dropped
            except OSError:
                self.dropped += 1

    def _write_all(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                time.sleep(0.05)  # the descriptor does not block, and its pipe is full


@contextlib.contextmanager
def logging_to_stderr(*, quiet: bool) -> Iterator[None]:
    """Within the context, log to stderr as a server does, unless the program has configured logging itself."""
    logging.getLogger("minifloat").setLevel(logging.WARNING if quiet else logging.INFO)
    root = logging.getLogger()
    if root.handlers:
        yield
        return
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # no stderr, or none that is a file
        logging.basicConfig(format=_FORMAT)
        yield
        return
    handler = DroppingHandler(descriptor)
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(RepeatFilter())
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        handler.end()
