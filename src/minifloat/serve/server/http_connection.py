"""One connection of the HTTP server: uvicorn's h11 protocol, with a deadline on every wait for the client.

uvicorn waits without end for a first request, for the rest of a head or body once a byte of it has come, and for a
client that does not read. It also closes sockets with unread bytes, which resets the connection, so that the client
loses the answer. This module adds to it:

- deadlines on the silence between requests, on a head, on a body, on the whole answer, and on a client that takes none
  of the answer's bytes;
- a limit on connections: the oldest one that waits for its client makes room for a new one. If all are at work, some
  more are accepted, on which `/health` is answered and all else is a 503;
- lingering: after a refusal the client may send on for a while, so that it reads the answer.

No library whose source we read has all of these. hypercorn 0.18 has one timeout per read, which a client that trickles
bytes renews, and none for a client that does not read; granian 2.8 has a deadline for HTTP/1 heads only, none for
bodies, writes or idle connections.

Source: RFC 9112, section 9.6, on closing in stages.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
from typing import Any, cast

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from minifloat.serve.server.errors import RETRY_AFTER, APIError
from minifloat.serve.server.settings import ServerSettings

_LOG = logging.getLogger("minifloat.server")

#: Connections beyond the limit that are accepted to answer `/health`, or 503.
EXTRA_CONNECTIONS = 32
#: Bytes of an answer that a client must take in each `write_timeout`, if so many are left.
_MIN_TAKEN = 1 << 16
#: Seconds by which the application's own timeouts, which send an error, come before those of the connection.
_HEAD_START = 1.0
#: Bodies up to this multiple of the limit are read to their end after they were refused.
_LINGER_BODIES = 2


class _Wait(enum.Enum):
    REQUEST = "the first byte of a request"
    HEAD = "the rest of a head"
    BODY = "the rest of a body"
    ANSWER = "the answer, and the client that reads it"
    END = "the client's end of a refused request"


class ConnectionLimit:
    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.open = 0
        self.waiting: dict[HTTPConnection, None] = {}

    def make_room(self, count: int = 1) -> int:
        """Drop up to `count` connections, those that have waited longest for their client. Return their number."""
        oldest = list(itertools.islice(self.waiting, count))
        for connection in oldest:
            connection.drop()
        return len(oldest)


class HTTPConnection(H11Protocol):
    """A connection; `limit` is shared by all connections of the server."""

    transport: Any

    def __init__(self, limit: ConnectionLimit, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._limit, self._settings = limit, limit.settings
        self._wait: _Wait | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._lingers, self._may_linger, self._has_left = False, True, False
        self._linger_bytes = _LINGER_BODIES * self._settings.max_body_bytes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        transport.set_write_buffer_limits(high=0)  # tells when the client has taken all that was written
        super().connection_made(cast(asyncio.Transport, _StagedTransport(self, transport)))
        limit, most = self._limit, self._settings.max_connections
        limit.open += 1
        if limit.open > most:
            limit.make_room()
        if limit.open > most:
            _LOG.warning("the limit of %d connections is reached, and all are at work", most)
            self.app = cast(Any, _HealthOnly(cast(ASGIApp, self.app)))
        if limit.open > most + EXTRA_CONNECTIONS:
            self.drop()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._stall):
            if timer is not None:
                timer.cancel()
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._lingers:
            super().data_received(data)
            self._watch()
            return
        self._linger_bytes -= len(data)
        if self._linger_bytes < 0:
            self._socket.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing: uvicorn's timeout ends at the first byte of a request; those of this class do not."""

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = self._socket.get_write_buffer_size()
        self._stall = self.loop.call_later(self._settings.write_timeout, self._check_taken)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP, with an error of the API instead of uvicorn's text."""
        if self.conn.our_state is h11.IDLE or (self.cycle is not None and not self.cycle.response_started):
            self._socket.write(plain_response(APIError(400, "the request is not valid HTTP")))
        self.transport.close()

    def shutdown(self) -> None:
        """End the connection, or let its request finish."""
        self._may_linger = False
        if self._lingers:
            self._socket.abort()
        else:
            super().shutdown()

    def drop(self) -> None:
        self._leave()
        self._socket.abort()

    def _leave(self) -> None:
        self._limit.waiting.pop(self, None)
        self._limit.open -= not self._has_left
        self._has_left = True

    def _now_waits_for(self) -> _Wait:
        if self._lingers:
            return _Wait.END
        if self.conn.their_state is h11.SEND_BODY:
            return _Wait.BODY
        if self.cycle is not None and not self.cycle.response_complete:
            return _Wait.ANSWER
        if self._socket.get_write_buffer_size():
            return _Wait.ANSWER
        return _Wait.HEAD if self.conn.trailing_data[0] else _Wait.REQUEST

    def _watch(self) -> None:
        """Set the deadline of what the connection waits for, if that has changed."""
        if self._has_left or (self._socket.is_closing() and not self._socket.get_write_buffer_size()):
            return
        wait = self._now_waits_for()
        owes_nothing = self.cycle is None or self.cycle.response_complete
        if wait is _Wait.ANSWER or not owes_nothing:
            self._limit.waiting.pop(self, None)
        else:
            self._limit.waiting.setdefault(self)
        if wait is self._wait:
            return
        self._wait = wait
        if self._deadline is not None:
            self._deadline.cancel()
        settings = self._settings
        seconds = {
            _Wait.REQUEST: settings.keep_alive_timeout,
            _Wait.HEAD: settings.read_timeout,
            _Wait.BODY: settings.read_timeout + _HEAD_START,
            _Wait.ANSWER: settings.request_timeout + settings.write_timeout,
            _Wait.END: settings.read_timeout,
        }[wait]
        self._deadline = self.loop.call_later(seconds, self.drop)

    def _check_taken(self) -> None:
        unsent = self._socket.get_write_buffer_size()
        if unsent > self._unsent - _MIN_TAKEN:
            self.drop()
            return
        self._unsent = unsent
        self._stall = self.loop.call_later(self._settings.write_timeout, self._check_taken)

    def close(self) -> None:
        """Close the socket once everything is written, and read on before if the client is still sending."""
        if self._lingers or self._socket.is_closing():
            return
        if not self._may_linger or self.conn.their_state not in (h11.SEND_BODY, h11.ERROR):
            self._socket.close()
            return
        self._lingers = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self._socket.write_eof()
        self._watch()

    @property
    def is_closing(self) -> bool:
        return self._lingers or self._socket.is_closing()


class _StagedTransport:
    """A transport whose end is that of its connection: `HTTPConnection.close`."""

    def __init__(self, connection: HTTPConnection, transport: asyncio.Transport) -> None:
        self._connection, self._transport = connection, transport

    def close(self) -> None:
        self._connection.close()

    def is_closing(self) -> bool:
        return self._connection.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _HealthOnly:
    """Answers `/health`, and all else with 503, and ends the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        if scope["path"] == "/health":
            await self._app(scope, receive, send_and_close)
            return
        error = APIError(
            503,
            "the server has reached its limit of connections; try again later",
            code="too_many_connections",
            headers={"retry-after": str(RETRY_AFTER)},
        )
        await error.response(scope["path"])(scope, receive, send_and_close)


def plain_response(error: APIError) -> bytes:
    """Return the bytes of an error that is sent outside of any request, after which the connection ends."""
    body = error.body.model_dump_json().encode()
    head = (
        f"HTTP/1.1 {error.status_code} Bad Request\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
