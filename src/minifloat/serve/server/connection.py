"""The HTTP server: uvicorn with h11, with limits on connections, and a shutdown that loses no admitted request."""

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
#: Seconds after the drain in which the last answers are still written.
_FINAL_WRITE_SECONDS = 5
_KEEP_ALIVE_SECONDS = 30
_POLL_SECONDS = 0.05


class _Protocol(H11Protocol):
    """Refuses connections beyond the limit and closes those without a first request.

    uvicorn waits for the first request of a connection forever, and applies its limit only once a request has come.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._first_head = self.loop.call_later(self.timeout_keep_alive, self._close_if_silent)
        limit = self.config.limit_concurrency
        if limit is not None and len(self.connections) > limit:
            transport.write(_TOO_MANY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._first_head.cancel()
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()


def _too_many_connections() -> bytes:
    """Return the response to a connection beyond the limit, which is sent before any request."""
    error = APIError(
        503, "the server has reached its limit of connections; try again later", code="too_many_connections"
    )
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


_TOO_MANY = _too_many_connections()


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then finishes the admitted requests; a second signal ends it at once.

    Args:
        app: The application to serve.
        engine: The engine to drain at the end.
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
                timeout_graceful_shutdown=int(settings.shutdown_timeout) + _FINAL_WRITE_SECONDS,
                h11_max_incomplete_event_size=settings.max_header_bytes,
            )
        )
        self._engine, self._seconds = engine, settings.shutdown_timeout

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, let the engine finish its requests and wait until the answers are written."""
        _LOG.info("stopping: finishing admitted requests, for at most %g s", self._seconds)
        draining = asyncio.create_task(self._engine.close(self._seconds))
        aborting = asyncio.create_task(self._abort_if_forced())
        await super().shutdown(sockets)
        aborting.cancel()
        await draining

    async def _abort_if_forced(self) -> None:
        """Abort all connections after a second signal, which cancels their requests."""
        while not self.force_exit:
            await asyncio.sleep(_POLL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, and abort at the second.

        uvicorn's own handler would raise the signals again at the end, which turns a requested stop into a death by
        signal.
        """
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def listen(settings: ServerSettings) -> socket.socket:
    """Return a bound socket. Call it before loading a model, so that an address in use is an error at once.

    Raises:
        UsageError: If the address cannot be bound.
    """
    return bind(settings.host, settings.port)


def address(listening: socket.socket) -> str:
    """Return the URL of a listening socket."""
    name: Any = listening.getsockname()
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"
