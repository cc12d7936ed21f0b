"""Raw bytes of a connection: whatever arrives, answers are those of HTTP with a status below 500, and nothing stays."""

from __future__ import annotations

import asyncio
import functools
import zlib
from random import Random
from typing import Any

from fake_engine import FakeEngine
from uvicorn.server import ServerState

from fuzzing import small
from fuzzing.mutation import change_bytes
from fuzzing.serving_app import MODEL, PATIENCE, Application
from fuzzing.target import Target
from minifloat.model.runtime.tokenizer import load_tokenizer
from minifloat.serve.server.http_server import Server

_MOST_BYTES = 1 << 20  # of the answers


@functools.cache
def _application() -> tuple[Application, Any]:
    application = Application(FakeEngine(load_tokenizer(small.STORYBOOK)))
    config = Server(application.app, application.engine, application.settings).config
    config.load()
    return application, config


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 80)})
        self.written, self.closed, self.ended, self.reading = b"", False, False, True

    def write(self, data: Any) -> None:
        assert not self.closed, "written after the connection was closed"
        assert not self.ended, "written after the end of the stream was announced"
        self.written += bytes(data)
        assert len(self.written) < _MOST_BYTES

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.closed

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return 0

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return 0, 1 << 16

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


async def _talk(config: Any, pieces: list[bytes]) -> bytes:
    """Send the pieces, one by one, then close; return what was answered."""
    state, transport = ServerState(), _Transport()
    protocol = config.http_protocol_class(config=config, server_state=state, app_state={})
    protocol.connection_made(transport)
    for piece in pieces:
        until = asyncio.get_running_loop().time() + PATIENCE
        while not transport.reading and not transport.closed:
            await asyncio.sleep(0.001)
            assert asyncio.get_running_loop().time() < until, "the server stopped reading"
        if transport.closed:
            break
        protocol.data_received(piece)
        await asyncio.sleep(0)
    await asyncio.sleep(0.005)
    if not transport.closed:
        protocol.eof_received()
        transport.close()
    protocol.connection_lost(None)
    while state.tasks:
        await asyncio.sleep(0.001)
    assert not state.connections
    return transport.written


def _run(data: bytes) -> None:
    application, config = _application()
    random = Random(zlib.crc32(data))
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.choice((0, 0, 1, 4))))
    pieces = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    written = application.wait(_talk(config, [piece for piece in pieces if piece]))
    application.wait(application.idle())
    if b"HEAD" not in data:  # its answers have no body
        _judge(written)


def _judge(written: bytes) -> None:
    """Raise unless these are answers of HTTP/1.1; the last may be cut short, where the client left."""
    while written:
        head, found, rest = written.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        assert lines[0].startswith(b"HTTP/1.1 "), lines[0]
        status = int(lines[0].split()[1])
        assert status in (100, 200) or 400 <= status < 500, head
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        if status == 100:
            written = rest
        elif headers.get(b"transfer-encoding") == b"chunked":
            written = _after_chunks(rest)
        else:
            assert found, head
            written = rest[int(headers[b"content-length"]) :]


def _after_chunks(rest: bytes) -> bytes:
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        rest = rest[int(size, 16) + 2 :]
        if int(size, 16) == 0:
            break
    return rest


_WORDS = (
    b"GET ", b"POST ", b"OPTIONS ", b"HEAD ", b"PUT ", b"CONNECT ", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n",
    b" HTTP/2\r\n", b"PRI * ", b"/health", b"/v1/models", b"/v1/completions", b"/metrics", b"/status", b"/../", b"//",
    b"*", b"?a=b", b"%00", b"%2e%2e", b"Host: localhost\r\n", b"Host: x\r\n", b"Content-Length: 5\r\n",
    b"Content-Length: 0\r\n", b"Content-Length: -1\r\n", b"Content-Length: 99999999999\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n", b"Upgrade: h2c\r\n",
    b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Connection: keep-alive, Upgrade\r\n",
    b"X-Request-Id: a b\r\n", b"Content-Type: application/json\r\n", b"Authorization: Bearer x\r\n",
    b"Cookie: a=b\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"ffffffff\r\n", b"5;x=y\r\nhello\r\n", b"\n", b"\r", b"\x00",
    b"\x80", b" ", b"\t", b":", b"{}", b"[[[[", b'"stream": true, ',
)  # fmt: skip


def _mutate(data: bytes, largest: int, random: Random) -> bytes:
    lines = data.split(b"\r\n")
    for _ in range(random.choice((1, 1, 2, 3))):
        kind, position = random.randrange(5), random.randrange(len(lines))
        if kind == 0:
            lines.insert(position, random.choice(_WORDS).removesuffix(b"\r\n"))
        elif kind == 1 and len(lines) > 1:
            del lines[position]
        elif kind == 2:
            lines.insert(position, random.choice(lines))
        else:
            line = lines[position]
            cut = random.randrange(len(line) + 1)
            word = random.choice(_WORDS)
            lines[position] = line[:cut] + word + line[cut:] if kind == 3 else change_bytes(line, random)
    return b"\r\n".join(lines)[:largest]


def _seeds() -> dict[str, bytes]:
    def request(line: str, *headers: str, body: bytes = b"") -> bytes:
        return "\r\n".join([line, "Host: localhost", *headers, "", ""]).encode() + body

    body = b'{"model": "%s", "prompt": "Once upon", "max_tokens": 2, "stream": false}' % MODEL.encode()
    post, kind = "POST /v1/completions HTTP/1.1", "Content-Type: application/json"
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    whole = request(post, kind, f"Content-Length: {len(body)}", body=body)
    return {
        "health": request("GET /health HTTP/1.1"),
        "twice": request("GET /v1/models HTTP/1.1") + request("GET /nothing HTTP/1.1", "Connection: close"),
        "whole": whole,
        "chunked": request(post, kind, "Transfer-Encoding: chunked", body=chunks) + request("GET /health HTTP/1.0"),
        "expect": request(post, kind, "Expect: 100-continue", f"Content-Length: {len(body)}", body=body) + whole,
        "stream": whole.replace(b"false", b"true "),
        "old": b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n",
    }


TARGET = Target(_run, _seeds, seconds=5, mutate=_mutate)
