"""How the server speaks HTTP: uvicorn with h11, which takes limits, and stops in an order that loses nothing."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from minifloat.serve.server.errors import RETRY_AFTER, APIError
from minifloat.serve.server.settings import ServerSettings
from minifloat.serve.sockets import bind

if TYPE_CHECKING:
    from minifloat.serve.engine import AsyncEngine

_LOG = logging.getLogger("minifloat.server")
#: Seconds beyond the drain in which answers about its end are still written.
_LAST_WORDS = 5
_KEEP_ALIVE_SECONDS = 30
_TICK = 0.05


class _Protocol(H11Protocol):
    """Also refuses connections that are too many, and ends those on which nothing comes.

    uvicorn waits for the first request of a connection forever, and counts connections only when one has come.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._first_head = self.loop.call_later(self.timeout_keep_alive, self._close_if_silent)
        most = self.config.limit_concurrency
        if most is not None and len(self.connections) > most:
            transport.write(_TOO_MANY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._first_head.cancel()
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()


def _too_many() -> bytes:
    """The answer to a connection that is one too many, before it has asked."""
    error = APIError(503, "the server has as many connections as it may have", code="too_many_connections")
    body = error.body.model_dump_json().encode()
    lines = (
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"Retry-After: {RETRY_AFTER}",
        "Connection: close",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + body


_TOO_MANY = _too_many()


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then finishes what was admitted; a second signal ends it at once.

    Args:
        app: What is served.
        engine: Drained at the end.
        settings: Address and limits.
    """

    def __init__(self, app: ASGIApp, engine: AsyncEngine, settings: ServerSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=settings.max_connections,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(settings.shutdown_timeout) + _LAST_WORDS,
                h11_max_incomplete_event_size=settings.max_header_bytes,
            )
        )
        self._engine, self._seconds = engine, settings.shutdown_timeout

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, let the engine finish what it has, wait until it is written."""
        _LOG.info("stopping: finishing what was admitted, for at most %g s", self._seconds)
        draining = asyncio.create_task(self._engine.close(self._seconds))
        hurrying = asyncio.create_task(self._hurry())
        await super().shutdown(sockets)
        hurrying.cancel()
        await draining

    async def _hurry(self) -> None:
        """Break off all connections once that is asked for; what nobody waits for is cancelled."""
        while not self.force_exit:
            await asyncio.sleep(_TICK)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal stops, the second one hurries.

        uvicorn would raise them again at its end; a stop that was asked for is no death by a signal.
        """
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def listen(settings: ServerSettings) -> socket.socket:
    """A listening socket, made before a model is loaded: an address in use is found out at once.

    Raises:
        UsageError: The address cannot be had.
    """
    return bind(settings.host, settings.port)


def address(listening: socket.socket) -> str:
    """The URL of a socket."""
    name: Any = listening.getsockname()
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"
