"""Descriptors: the limit on open files is raised, connections fit it, and running out of it stops nothing."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import running, wait_for

from minifloat.serve.server.http_server import RESERVED_DESCRIPTORS, fitting_connections

#: Opens connections and holds them; at the next line of its input it asks for the health over one more.
HOLD = """
import socket, sys
address = ("127.0.0.1", int(sys.argv[1]))
sys.stdin.readline()
held = [socket.create_connection(address) for _ in range(int(sys.argv[2]))]
print("held", flush=True)
sys.stdin.readline()
asking = socket.create_connection(address)
asking.sendall(b"GET /health HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
print(asking.recv(65536).split(b"\\r\\n")[0].decode(), flush=True)
sys.stdin.read()
"""


def _open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def set_limit() -> Iterator[Callable[[int], None]]:
    """Sets the soft limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_is_raised_to_what_the_connections_need(set_limit: Callable[[int], None]) -> None:
    set_limit(_open() + 50)
    assert fitting_connections(300) == 300
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= _open() + RESERVED_DESCRIPTORS + 300 - 2


def test_connections_are_clamped_to_the_hard_limit_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    fitting = fitting_connections(5000)
    assert limits[-1] == (4096, 4096)
    assert 4096 - RESERVED_DESCRIPTORS - _open() - 2 <= fitting < 4096 - RESERVED_DESCRIPTORS
    assert "connections instead of 5000" in caplog.text
    assert "ulimit -Hn" in caplog.text
    assert fitting_connections(3000) == 3000


def test_without_descriptors_the_server_waits_logs_little_and_answers_again(
    tokenizer: Any, set_limit: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The connections that wait for a request make room for those that have one."""
    with running(FakeEngine(tokenizer), max_connections=10_000) as client:
        command = [sys.executable, "-c", HOLD, str(client.port), "150"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holding:
            assert holding.stdout is not None
            assert holding.stdin is not None
            # Far fewer than connections. The other process keeps its own limit: in this one, the server and a client
            # would share it, and whichever came first would have the last descriptor.
            set_limit(_open() + 40)
            holding.stdin.write("begin\n")
            holding.stdin.flush()
            assert holding.stdout.readline() == "held\n"
            assert wait_for(lambda: "no connection can be accepted" in caplog.text)
            holding.stdin.write("ask\n")
            holding.stdin.flush()
            assert holding.stdout.readline() == "HTTP/1.1 200 OK\n"
            holding.communicate("")
        assert client.get("/health").status == 200
    assert len(caplog.text) < 20_000, "the log is flooded"
    assert "Traceback" not in caplog.text
    assert [record for record in caplog.records if record.levelno >= logging.WARNING]
