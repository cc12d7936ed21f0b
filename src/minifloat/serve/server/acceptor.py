"""Accepts connections, and stays calm when no descriptors are left.

asyncio tries to accept once per place in the backlog, logs each failure with its traceback, and schedules a retry for
each: 2,048 at a time.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path

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
        """Accept no more connections."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening.fileno())

    async def wait_closed(self) -> None:
        """Wait until the last accepted connections have their protocol."""
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
