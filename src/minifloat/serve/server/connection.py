"""The HTTP server: uvicorn, with connections and an acceptor of our own, and a shutdown that loses no admitted request.

`http_connection` has the deadlines of a connection and their limit, `acceptor` the descriptors.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from minifloat.serve.server.acceptor import Acceptor
from minifloat.serve.server.http_connection import ConnectionLimit, HTTPConnection
from minifloat.serve.server.settings import ServerSettings
from minifloat.serve.sockets import bind

if TYPE_CHECKING:
    from minifloat.engine import AsyncEngine

_LOG = logging.getLogger("minifloat.server")
#: Seconds after the drain in which the last answers are still written.
_FINAL_WRITE_SECONDS = 5
_POLL_SECONDS = 0.05


class Server(uvicorn.Server):
    """Serves until SIGTERM, SIGINT or SIGHUP, then finishes the admitted requests; a second signal ends it at once."""

    def __init__(self, app: ASGIApp, engine: AsyncEngine, settings: ServerSettings) -> None:
        self._limit = ConnectionLimit(settings)
        super().__init__(
            uvicorn.Config(
                app,
                http=functools.partial(HTTPConnection, self._limit),  # type: ignore[arg-type]
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=int(settings.shutdown_timeout) + _FINAL_WRITE_SECONDS,
                h11_max_incomplete_event_size=settings.max_header_bytes,
            )
        )
        self._engine, self._seconds = engine, settings.shutdown_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections of the sockets."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(uvicorn.config.STARTUP_FAILURE)
        connection: Any = self.config.http_protocol_class
        protocol = functools.partial(
            connection,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.servers: Any = [Acceptor(listening, protocol, self._limit.make_room) for listening in sockets or ()]
        self.started = True

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

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Treat SIGHUP, which a terminal sends when it closes, as SIGTERM, unless the process ignores it (nohup)."""
        with super().capture_signals():
            here = threading.current_thread() is threading.main_thread()
            if not here or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
                yield
                return
            before = signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, and abort at the second.

        uvicorn's own handler would raise the signals again at the end, which turns a requested stop into a death by
        signal.
        """
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def listen(settings: ServerSettings) -> socket.socket:
    """Return a bound socket. Call it before loading a model, so that an address in use is an error at once."""
    return bind(settings.host, settings.port)


def address(listening: socket.socket) -> str:
    """Return the URL of a listening socket."""
    name: Any = listening.getsockname()
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"
