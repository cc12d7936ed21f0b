"""The log: a pipe that nobody reads does not stop the server, and nobody can flood it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import PATIENCE, running, wait_for

from minifloat.serve.server.log import DroppingHandler, RepeatFilter

#: A process that logs more than a pipe holds while nobody reads, says so, and ends.
LOGS_INTO_A_FULL_PIPE = """
import logging, sys
from minifloat.serve.server.log import logging_to_stderr
with logging_to_stderr(quiet=False):
    for number in range(20_000):
        logging.getLogger("minifloat.server").info("%d: %s", number, "x" * 100)
    print("alive", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def pipe() -> Any:
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        os.close(descriptor)


def _fill(descriptor: int) -> None:
    """Write to a pipe until it is full."""
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(descriptor, b"." * 4096)
    os.set_blocking(descriptor, True)


def _read(descriptor: int, end: bytes) -> bytes:
    received = b""
    while end not in received:
        received += os.read(descriptor, 1 << 20)
    return received


def test_a_pipe_that_nobody_reads_does_not_stop_the_server(tokenizer: Any, pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    handler = DroppingHandler(writing, lines=64)
    logger = logging.getLogger("minifloat.server")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with running(FakeEngine(tokenizer)) as client:
            _fill(writing)
            for _ in range(100):
                logger.info("x" * 100)  # fills the queue
            assert wait_for(lambda: handler.dropped > 0)
            for _ in range(5):
                assert client.get("/version").status == 200
            assert b"lines of the log were dropped" in _read(reading, b"nobody read it\n")
            assert client.get("/version").status == 200
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.end()


@pytest.mark.parametrize("read", [True, False])
def test_a_process_with_a_full_log_pipe_goes_on_and_ends(read: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOGS_INTO_A_FULL_PIPE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "alive\n"
        if read:
            _, log = process.communicate("end\n", timeout=PATIENCE)
            assert "minifloat" not in log.partition("\n")[0]
            assert " INFO 0: xxx" in log
        else:
            assert process.stdin is not None
            process.stdin.write("end\n")
            process.stdin.flush()
            process.wait(PATIENCE)
        assert process.returncode == 0


def test_lines_come_in_order_and_whole(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    handler = DroppingHandler(writing)
    for number in range(100):
        handler.emit(logging.LogRecord("a", logging.INFO, "", 0, "line %d \ud800", (number,), None))
    handler.emit(logging.LogRecord("a", logging.INFO, "", 0, "line %d", ("no number",), None))
    handler.end()
    lines = os.read(reading, 1 << 16).decode().splitlines()
    assert lines[:100] == [f"line {number} \\ud800" for number in range(100)]
    assert "cannot be formatted" in lines[100]


def test_a_reader_that_goes_away_is_survived() -> None:
    reading, writing = os.pipe()
    handler = DroppingHandler(writing)
    os.close(reading)
    handler.emit(logging.LogRecord("a", logging.INFO, "", 0, "lost", (), None))
    assert wait_for(lambda: handler.dropped == 1)
    handler.end()
    os.close(writing)


def test_repeated_warnings_are_written_a_few_times_and_counted() -> None:
    now = [0.0]
    repeats = RepeatFilter(lambda: now[0])

    def log(message: str, *arguments: Any, level: int = logging.WARNING) -> logging.LogRecord | None:
        record = logging.LogRecord("a", level, "", 0, message, arguments, None)
        return record if repeats.filter(record) else None

    assert [log("no descriptor for %d", number) is not None for number in range(1000)].count(True) == 5
    assert log("another") is not None
    assert all(log("a request", level=logging.INFO) for _ in range(100))
    now[0] = 11.0
    again = log("no descriptor for %d", 7)
    assert again is not None
    assert again.getMessage() == "no descriptor for 7 (995 more like it in the last 11 s)"
    began = time.perf_counter()
    for number in range(10_000):
        log(f"kind {number}")
    assert len(repeats._seen) <= 256
    assert time.perf_counter() - began < PATIENCE
