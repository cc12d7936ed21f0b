"""A server in a thread of the test process, behind a real socket, and a client for it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from minifloat.engine import AsyncEngine
from minifloat.serve.server import ServerSettings, create_app, listen
from minifloat.serve.server.http_server import Server

MODEL = "tiny"
#: Seconds to wait for an event that must come: long enough for a machine whose processors are busy with other work.
PATIENCE = 120.0
SETTINGS = ServerSettings(model_name=MODEL, port=0, shutdown_timeout=5.0)


@dataclass(frozen=True)
class Answer:
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which must have all of OpenAI's fields and no others."""
        body = self.json
        assert set(body) == {"error"}, body
        assert set(body["error"]) == {"message", "type", "param", "code"}, body
        return dict(body["error"])

    @property
    def events(self) -> list[Any]:
        """The events of a stream, which must end as OpenAI's do."""
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


class Client:
    """Talks to a server, one connection per request."""

    def __init__(self, port: int, engine: AsyncEngine, server: Server) -> None:
        self.port, self.engine, self.server = port, engine, server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = PATIENCE
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
            content_type = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, data, content_type | (headers or {}))
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.send("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})

    def complete(self, prompt: Any = "abc", **fields: Any) -> Answer:
        return self.post("/v1/completions", {"model": MODEL, "prompt": prompt} | fields)

    def chat(self, content: Any = "hello", **fields: Any) -> Answer:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": messages} | fields)

    def connect(self) -> socket.socket:
        """Open a connection without sending anything."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def open_stream(self, **fields: Any) -> socket.socket:
        """Return a connection on which the first event of a streamed completion has arrived."""
        body = json.dumps({"model": MODEL, "prompt": "abc", "stream": True, "ignore_eos": True} | fields).encode()
        connection = self.connect()
        lines = ("POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json")
        head = "\r\n".join((*lines, f"Content-Length: {len(body)}", "", ""))
        connection.sendall(head.encode() + body)
        received = b""
        while b"data: " not in received:
            piece = connection.recv(65536)
            assert piece, received
            received += piece
        return connection

    def idle(self) -> bool:
        """Wait until no request runs or waits. Return False if some still do after `PATIENCE` seconds."""
        return wait_for(lambda: self.engine.running == 0 and self.engine.waiting == 0)


def wait_for(condition: Callable[[], bool]) -> bool:
    """Wait until a condition is true. Return False if it is not after `PATIENCE` seconds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def running(
    engine: Any, settings: ServerSettings = SETTINGS, *, max_queue: int = 256, **changes: Any
) -> Iterator[Client]:
    """Run a server of an engine until the end of the block."""
    settings = replace(settings, **changes)
    listening = listen(settings)
    served = AsyncEngine(engine, max_queue)
    server = Server(create_app(served, settings), served, settings)
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            asyncio.run(server.serve(sockets=[listening]))
        except BaseException as error:
            failures.append(error)

    port = listening.getsockname()[1]
    thread = threading.Thread(target=serve, name="test-server")
    thread.start()
    try:
        assert wait_for(lambda: server.started or bool(failures)), "the server did not start"
        yield Client(port, served, server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server did not stop"
        assert not failures, failures
