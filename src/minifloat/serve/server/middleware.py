"""What every request passes before a route sees it: an id, the log, and the guard.

Plain ASGI: Starlette's `BaseHTTPMiddleware` would stand between a stream and its client, and hide that the client left.
The guard refuses, in this order: headers that are too large, host names that are not this server's (a web page that
rebinds its name to 127.0.0.1 is still a foreign page), callers without a key, and bodies that are too large, counted as
they arrive, or too slow.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minifloat.serve.server.errors import APIError
from minifloat.serve.server.metrics import Metrics
from minifloat.serve.server.settings import ServerSettings, hash_key

_LOG = logging.getLogger("minifloat.server")

#: Ids of clients that are passed on; others might forge lines of a log.
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
#: The page without data, and whether the process lives: what needs no key.
_OPEN = frozenset({"/", "/health"})
#: What monitors ask for every second.
_PROBES = frozenset({"/health", "/ready", "/metrics", "/status"})
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
#: Statuses that are counted under the route's own path; unknown paths share one, for a client chooses them.
_NO_ROUTE = "other"
#: With an answer that comes before the body: the rest of it is not read.
_CLOSE = {"connection": "close"}


class RequestLog:
    """Gives each request an id, logs one line about it and counts it. What was asked is never logged.

    Args:
        app: What comes next.
        metrics: Where it is counted.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _SANE_ID.fullmatch(given) else secrets.token_hex(12)
        began, status = time.monotonic(), 499

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            route = getattr(scope.get("route"), "path", _NO_ROUTE)
            self._metrics.answered(route, status)
            seconds = time.monotonic() - began
            level = logging.DEBUG if status < 400 and route in _PROBES else logging.INFO
            path = _printable(scope["path"])
            _LOG.log(level, "%s %s %s %d %.3f s", name, scope["method"], path, status, seconds)


def _printable(path: str) -> str:
    """A path as it may stand in a log: it is the client's."""
    return path if len(path) <= 200 and path.isascii() and path.isprintable() else "(odd path)"


class Guard:
    """Refuses what must not reach a route.

    Args:
        app: What comes next.
        settings: Hosts, keys and limits.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        own = _LOOPBACK_NAMES if settings.on_loopback else ()
        self._hosts = frozenset(name.lower() for name in (*settings.allowed_hosts, *own))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_headers(scope)
            self._check_host(headers)
            self._check_key(scope)
            self._check_body(scope, headers)
        except APIError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, _Body(receive, self._settings).receive, send)

    def _check_headers(self, scope: Scope) -> None:
        # h11 counts what has come of a head that is not complete: one that came in one piece is not counted
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._settings.max_header_bytes:
            raise APIError(431, f"the headers have more than {self._settings.max_header_bytes} bytes", headers=_CLOSE)

    def _check_host(self, headers: Headers) -> None:
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        if self._hosts and host not in self._hosts:
            raise APIError(
                403,
                "this server does not answer to the host name of the request; start it with --allowed-host NAME",
                code="host_not_allowed",
            )

    def _check_key(self, scope: Scope) -> None:
        state = scope.setdefault("state", {})
        if not self._settings.api_keys or scope["path"] in _OPEN:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        digest = hash_key(key.strip())
        # every key is compared, and hashes of equal length: the time tells nothing about any of them
        known = [hmac.compare_digest(digest, one) for one in self._settings.api_keys]
        if kind.lower() != b"bearer" or not any(known):
            raise APIError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        state["api_key"] = digest.hex()

    def _check_body(self, scope: Scope, headers: Headers) -> None:
        if scope["method"] != "POST":
            return  # no other method has a route that reads a body
        length = headers.get("content-length", "0")
        if not length.isdigit() or len(length) > 18 or int(length) > self._settings.max_body_bytes:
            raise _too_large(self._settings)


def _too_large(settings: ServerSettings) -> APIError:
    return APIError(413, f"the body has more than {settings.max_body_bytes} bytes", headers=_CLOSE)


class _Body:
    """Reads a body within limits of size and time.

    Args:
        receive: Of the connection.
        settings: The limits.
    """

    def __init__(self, receive: Receive, settings: ServerSettings) -> None:
        self._receive, self._settings = receive, settings
        self._bytes, self._done = 0, False
        self._until = asyncio.get_running_loop().time() + settings.read_timeout

    async def receive(self) -> Message:
        """The next piece.

        Raises:
            APIError: It is one too many, or did not come in time.
        """
        if self._done:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise APIError(408, "the request did not arrive in time", headers=_CLOSE) from None
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._settings.max_body_bytes:
            raise _too_large(self._settings)
        self._done = not message.get("more_body", False)
        return message
