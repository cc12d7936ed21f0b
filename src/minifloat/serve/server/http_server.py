"""The HTTP server: uvicorn, with connections and an acceptor of our own, and a shutdown that loses no admitted request.

`http_connection` has the deadlines of a connection and their limit. asyncio's own acceptor tries to accept once per
place in the backlog when no descriptors are left, logs each failure with its traceback, and schedules a retry for each:
2,048 at a time.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from minifloat.serve.server.http_connection import ConnectionLimit, HTTPConnection
from minifloat.serve.server.settings import ServerSettings
from minifloat.serve.starting import bind

if TYPE_CHECKING:
    from minifloat.engine import AsyncEngine

_LOG = logging.getLogger("minifloat.server")
#: Connections that the system keeps until they are accepted.
BACKLOG = 2048
#: Connections that are accepted before those at work get their turn.
_AT_ONCE = 16
#: Seconds until the next attempt when the system has no descriptor, or no memory, for a connection.
_RETRY_SECONDS = 0.5
#: The same after connections that wait for their client were closed.
_FREED_SECONDS = 0.05
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
#: Descriptors for connections beyond the limit, those just accepted, and files that are opened meanwhile.
RESERVED_DESCRIPTORS = 96
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
        # uvicorn's handler raises the signals again at the end, which turns a requested stop into a death by signal.
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def listen(settings: ServerSettings) -> socket.socket:
    """Return a bound socket. Call it before loading a model, so that an address in use is an error at once."""
    return bind(settings.host, settings.port)


def address(listening: socket.socket) -> str:
    name: Any = listening.getsockname()
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"


class Acceptor:
    """Accepts the connections of a listening socket. It stands in for `asyncio.Server`."""

    def __init__(
        self, listening: socket.socket, protocol: Callable[[], asyncio.Protocol], make_room: Callable[[int], int]
    ) -> None:
        self._listening, self._protocol, self._make_room = listening, protocol, make_room
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening.fileno())

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._opening)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                freed = self._make_room(_AT_ONCE)
                _LOG.warning("no connection can be accepted: %s; closed %d that wait", error.strerror, freed)
                self._loop.remove_reader(self._listening.fileno())
                self._retry = self._loop.call_later(_FREED_SECONDS if freed else _RETRY_SECONDS, self._resume)
                return
            accepted.setblocking(False)
            # asyncio sets it only on sockets that were made with IPPROTO_TCP. Without it, the second write of an answer
            # waits for the client to acknowledge the first, 40 ms.
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._open(accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, accepted)
        except OSError as error:  # the client has gone already
            accepted.close()
            _LOG.debug("a connection ended while it was accepted: %s", error)

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening.fileno(), self._accept)


def fitting_connections(wanted: int) -> int:
    """Raise the soft limit on open files as far as `wanted` connections need, and return how many then fit."""
    if sys.platform == "win32":
        return wanted
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = _open_descriptors()
    needed = used + RESERVED_DESCRIPTORS + wanted
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        except (OSError, ValueError) as error:
            _LOG.warning("the limit of %d open files cannot be raised: %s", soft, error)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    fitting = max(1, soft - used - RESERVED_DESCRIPTORS)
    _LOG.warning(
        "%d connections instead of %d: the process may open %d files (ulimit -Hn), and %d are open; raise that limit, "
        "or lower --max-connections",
        fitting,
        wanted,
        soft,
        used,
    )
    return fitting


def _open_descriptors() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(list(Path(folder).iterdir()))
        except OSError:
            continue
    return 64
