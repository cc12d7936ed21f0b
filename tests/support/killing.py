"""Runs that are killed in the middle of their work, for the tests of runs over layers."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from minifloat.checkpoint.layout import JOURNAL_FILE


def finished_in(work: Path) -> int:
    """The number of layers that are finished in a work folder."""
    journal = work / JOURNAL_FILE
    return journal.read_bytes().count(b'"file":"layer-') if journal.exists() else 0


def damage_file(path: Path, damage: str) -> None:
    """Damage a file: "a flipped bit", "cut short" or "gone"."""
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "cut short":
        path.write_bytes(content[:-5])
    else:
        content[-5] ^= 1
        path.write_bytes(content)


def run_and_kill(server: subprocess.Popen[str], log: Path, steps: int) -> list[str]:
    """Start a child, kill it after a number of progress calls, and return the steps that it reported.

    Args:
        server: Forks a child for each line on its standard input, and prints the child's id and then its exit code.
        log: The file that the child writes a line to for each progress call.
        steps: The number of calls.
    """
    log.write_text("")
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("\n")
    server.stdin.flush()
    child = int(server.stdout.readline())
    deadline = time.monotonic() + 60
    while log.read_text().count("\n") < steps and time.monotonic() < deadline:
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    assert int(server.stdout.readline()) == -signal.SIGKILL, "the child ended before it was killed"
    return log.read_text().splitlines()
