"""Runs that are killed in the middle of their work, for the tests of runs over layers."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minifloat.checkpoint.layout import JOURNAL_FILE

# Imports take seconds, so one process imports once and forks for every line on its standard input. The children sleep
# after every step, so that a kill lands during the work and not before or after it.
_SERVER = """
import os, pickle, sys, time
from pathlib import Path
{setup}
def progress(done, total, step):
    with open(sys.argv[1], "a") as file:
        file.write(f"{{step}}\\n")
    time.sleep({pause})
for line in sys.stdin:
    child = os.fork()
    if not child:
        run(progress, *pickle.loads(Path(sys.argv[2]).read_bytes()))
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def forking_server(setup: str, log: Path, *arguments: Any, pause: float) -> Iterator[subprocess.Popen[str]]:
    """A process for `run_and_kill` whose children call ``run(progress, *arguments)``, which `setup` defines."""
    data = log.with_name("data")
    data.write_bytes(pickle.dumps(arguments))
    command = [sys.executable, "-c", _SERVER.format(setup=setup, pause=pause), str(log), str(data)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:
        yield server


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
    """Start a child, kill it after a number of progress calls, and return the steps that it reported."""
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
