"""Bodies without a definite end, and refusals that the client must be able to read."""

from __future__ import annotations

import json
import socket

import pytest
from fake_engine import FakeEngine
from serving import PATIENCE, Client, running

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def exchange(client: Client, *pieces: bytes) -> bytes:
    """Send bytes and return everything that comes until the server ends the connection."""
    with client.connect() as connection:
        for piece in pieces:
            connection.sendall(piece)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received


@pytest.mark.parametrize("body", [b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n"])
def test_content_length_with_transfer_encoding_is_refused_and_the_connection_closed(
    client: Client, body: bytes
) -> None:
    """RFC 9112, sections 6.1 and 6.3: a proxy and this server could see the end of the request in two places."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = exchange(client, head + body + hidden)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"Content-Length and Transfer-Encoding" in answer
    assert answer.count(b"HTTP/1.1 ") == 1, "the bytes after it were read as a request"


def test_transfer_encoding_in_http_1_0_is_refused(client: Client) -> None:
    head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Transfer-Encoding: chunked\r\n\r\n"
    assert exchange(client, head, b"0\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_bytes_that_are_no_request_get_an_error_of_the_api(client: Client) -> None:
    answer = exchange(client, b"\x16\x03\x01 no HTTP\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("chunked", [False, True])
def test_the_answer_to_a_body_that_is_too_large_arrives_while_the_client_sends(
    tokenizer: object, chunked: bool
) -> None:
    """A server that closes a socket with unread bytes resets the connection, and the answer is lost."""
    size = 4 << 20  # more than the buffers of both sockets hold
    with running(FakeEngine(tokenizer), max_body_bytes=2 << 20) as client:
        if chunked:
            pieces = [POST, b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n" % size, b" " * size, b"\r\n0\r\n\r\n"]
        else:
            pieces = [POST, b"Content-Length: %d\r\n\r\n" % size, b" " * size]
        for _ in range(3):
            answer = exchange(client, *pieces)
            assert answer.startswith(b"HTTP/1.1 413"), answer[:100]
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_small_writes_are_sent_at_once(client: Client) -> None:
    """With Nagle's algorithm, the body of an answer on a kept connection came 40 ms after its head."""
    with client.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        name = connection.getsockname()
        (served,) = [one for one in client.server.server_state.connections if one.client == name]
        assert served.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_client_that_sends_on_after_its_refusal_is_cut_off(tokenizer: object) -> None:
    with running(FakeEngine(tokenizer), max_body_bytes=1 << 16) as client:
        with client.connect() as connection:
            connection.sendall(POST + b"Content-Length: 1000000000\r\n\r\n")
            with pytest.raises(OSError, match=r"reset|Broken pipe"):
                connection.sendall(b" " * 100_000_000)
        with client.connect() as connection:  # and so is one that reads its refusal and stays
            connection.settimeout(PATIENCE)
            connection.sendall(POST + b"Content-Length: 1000000000\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 413")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
