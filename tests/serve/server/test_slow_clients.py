"""Clients that send slowly, or never read: each wait for a client has a deadline, and refused callers block nobody."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import MODEL, PATIENCE, Client, running, wait_for

from minifloat.serve.server import read_api_keys

KEY = "the-only-key"
SHORT: dict[str, Any] = {"keep_alive_timeout": 0.2, "read_timeout": 0.2, "write_timeout": 0.2}
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def receive(connection: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    return received


def _trickle(connection: socket.socket) -> None:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        connection.sendall(b"X")
        time.sleep(0.02)


def seconds_until_closed(connection: socket.socket) -> float:
    """Wait until the server ends the connection."""
    began = time.monotonic()
    connection.settimeout(5.0)
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - began


@pytest.mark.parametrize("begin", [b"", b"\r\n", b"GET /hea", GET[:-2]], ids=["silent", "blank", "line", "headers"])
@pytest.mark.parametrize("first", [b"", GET], ids=["first", "second"])
def test_a_head_that_does_not_arrive_in_time_ends_the_connection(tokenizer: Any, first: bytes, begin: bytes) -> None:
    with running(FakeEngine(tokenizer), **SHORT) as client, client.connect() as connection:
        if first:
            connection.sendall(first)
            receive(connection, b'{"status":"ok"}')
        connection.sendall(begin)
        seconds_until_closed(connection)


def test_a_head_that_arrives_byte_by_byte_has_one_deadline(tokenizer: Any) -> None:
    with running(FakeEngine(tokenizer), **SHORT) as client, client.connect() as connection:
        connection.sendall(GET)
        receive(connection, b'{"status":"ok"}')
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            _trickle(connection)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [("POST /v1/completions", 401), ("POST /no/such/path", 404), ("GET /health", 200), ("POST /v1/completions", 408)],
)
@pytest.mark.parametrize("length", ["Content-Length: 100", "Transfer-Encoding: chunked"])
def test_a_body_that_does_not_arrive_in_time_ends_the_connection(
    tokenizer: Any, request_line: str, status: int, length: str
) -> None:
    keys = {401: read_api_keys([KEY])}.get(status, frozenset())
    with running(FakeEngine(tokenizer), api_keys=keys, **SHORT) as client, client.connect() as connection:
        head = f"{request_line} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(65536).startswith(f"HTTP/1.1 {status} ".encode())
        if status != 408:
            connection.sendall(b"1")  # a byte at a time keeps no connection open either
        seconds_until_closed(connection)


def test_a_thousand_waiting_sockets_shut_nobody_out(tokenizer: Any) -> None:
    """The oldest connection that waits for its request makes room for a new one."""
    with running(FakeEngine(tokenizer), max_connections=16, api_keys=read_api_keys([KEY])) as client:
        held = []
        for number in range(40):
            held.append(client.connect())
            if number % 3 == 1:
                held[-1].sendall(GET[:-2])
            elif number % 3 == 2:
                held[-1].sendall(POST + b"Content-Length: 100\r\n\r\n")
                assert held[-1].recv(65536).startswith(b"HTTP/1.1 401")
        assert wait_for(lambda: len(client.server.server_state.connections) <= 16)
        for _ in range(20):
            assert client.get("/v1/models", Authorization=f"Bearer {KEY}").status == 200
        for connection in held:
            connection.close()


def _open_unread(client: Client, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request on a connection with small buffers at both ends, and read nothing of the answer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE)
    connection.connect(("127.0.0.1", client.port))
    connections = client.server.server_state.connections
    assert wait_for(lambda: len(connections) == 1)
    (served,) = connections
    served.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    data = json.dumps({"model": MODEL} | body).encode()
    connection.sendall(
        POST.replace(b"/v1/completions", path.encode()) + b"Content-Length: %d\r\n\r\n" % len(data) + data
    )
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_never_reads_is_dropped_with_its_request(
    tokenizer: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minifloat.serve.server.generation._LAST_EVENT_SECONDS", 0.1)
    body = {"prompt": "x" * 20, "n": 8, "max_tokens": 380, "logprobs": 20, "stream": stream}
    with running(FakeEngine(tokenizer), request_timeout=60, shutdown_timeout=0.1, **SHORT) as client:
        connections = client.server.server_state.connections
        with _open_unread(client, "/v1/completions", body) as connection:
            assert wait_for(lambda: any(one.transport.get_write_buffer_size() for one in list(connections)))
            began = time.monotonic()
            assert wait_for(lambda: not connections)
            assert time.monotonic() - began < 5
            assert client.idle()
            connection.recv(1)


def test_a_client_that_reads_slowly_but_steadily_gets_all(tokenizer: Any) -> None:
    body = {"prompt": "x" * 20, "n": 8, "max_tokens": 380, "logprobs": 20}
    with (
        running(FakeEngine(tokenizer), **SHORT | {"write_timeout": 0.5}) as client,
        _open_unread(client, "/v1/completions", body) as connection,
    ):
        received = bytearray()
        while not received.endswith(b"}}}"):
            piece = connection.recv(1 << 17)
            assert piece, len(received)
            received += piece
            time.sleep(0.002)
    head, _, text = bytes(received).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert len(json.loads(text)["choices"]) == 8


def test_beyond_the_limit_health_is_answered_and_all_else_is_a_503(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer)
    with running(engine, max_connections=3) as client:
        engine.held = True
        body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
        held = [client.connect() for _ in range(3)]
        for connection in held:
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert wait_for(lambda: client.engine.running == 3)
        for _ in range(3):
            assert client.get("/health").status == 200
            refused = client.get("/v1/models")
            assert (refused.status, refused.error["code"]) == (503, "too_many_connections")
            assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
        for connection in held:
            connection.close()
        assert wait_for(lambda: client.get("/v1/models").status == 200)
        engine.held = False
