"""Middleware of every request: an id, the log, and the guard.

It is plain ASGI, because Starlette's `BaseHTTPMiddleware` buffers streams and hides that a client has disconnected. The
guard refuses, in this order: headers that are too large, a body without a definite end, foreign host names (a web page
may rebind its own name to 127.0.0.1), callers without a key, and bodies that are too large, counted as they arrive, or
too slow.
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

#: Request ids that clients may choose; other characters could forge lines of the log.
_HARMLESS_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
#: Paths that need no key: the page, which holds no data, and the health check.
_KEYLESS_PATHS = frozenset({"/", "/health"})
#: Paths that monitors request every second.
_PROBES = frozenset({"/health", "/ready", "/metrics", "/status"})
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
#: Name under which metrics count requests to unknown paths, which clients choose freely.
_NO_ROUTE = "other"
#: Header of an answer that is sent before the whole body is read.
_CLOSE = {"connection": "close"}


class RequestLog:
    """Gives each request an id, logs one line about it and counts it. Prompts and answers are never logged."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get("x-request-id", "")
        name = client_id if _HARMLESS_ID.fullmatch(client_id) else secrets.token_hex(12)
        began, status = time.monotonic(), 499

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", _NO_ROUTE)
            self._metrics.answered(route, status)
            seconds = time.monotonic() - began
            level = logging.DEBUG if status < 400 and route in _PROBES else logging.INFO
            path = _printable(scope["path"])
            _LOG.log(level, "%s %s %s %d %.3f s", name, scope["method"], path, status, seconds)


def _printable(path: str) -> str:
    """Return a path that is safe to log, since clients choose paths."""
    return path if len(path) <= 200 and path.isascii() and path.isprintable() else "(odd path)"


class Guard:
    """Refuses requests that must not reach a route."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        own = _LOOPBACK_NAMES if settings.on_loopback else ()
        self._hosts = frozenset(name.lower() for name in (*settings.allowed_hosts, *own))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_headers(scope)
            self._check_framing(scope)
            self._check_host(headers)
            self._check_key(scope)
            self._check_body(scope, headers)
        except APIError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, _Body(receive, self._settings).receive, send)

    def _check_headers(self, scope: Scope) -> None:
        # h11 limits the bytes of an incomplete head only, not of one that arrives in one piece
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._settings.max_header_bytes:
            raise APIError(431, f"the headers have more than {self._settings.max_header_bytes} bytes", headers=_CLOSE)

    def _check_framing(self, scope: Scope) -> None:
        """Refuse a body whose end a proxy may see elsewhere, by which a request could hide in another one."""
        # RFC 9112, sections 6.1 and 6.3
        names = {name for name, _ in scope["headers"]}
        if b"transfer-encoding" not in names:
            return
        if b"content-length" in names:
            raise APIError(400, "the request has both Content-Length and Transfer-Encoding", headers=_CLOSE)
        if scope["http_version"] == "1.0":
            raise APIError(400, "the request has Transfer-Encoding, which HTTP/1.0 does not know", headers=_CLOSE)

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
        if not self._settings.api_keys or scope["path"] in _KEYLESS_PATHS:
            return
        sent = {name: value for name, value in reversed(scope["headers"]) if name in (b"authorization", b"x-api-key")}
        kind, _, key = sent.get(b"authorization", b"").partition(b" ")
        bearer = hash_key(key.strip() if kind.lower() == b"bearer" else b"")
        digests = (bearer, hash_key(sent.get(b"x-api-key", b"").strip()))
        # All keys are compared, as hashes of equal length, so that the time taken reveals nothing about them.
        matches = [[hmac.compare_digest(digest, api_key) for api_key in self._settings.api_keys] for digest in digests]
        valid = [digest for digest, equal in zip(digests, matches, strict=True) if any(equal)]
        if not valid:
            raise APIError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        state["api_key"] = valid[0].hex()

    def _check_body(self, scope: Scope, headers: Headers) -> None:
        if scope["method"] != "POST":
            return  # no other method has a route that reads a body
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > self._settings.max_body_bytes:
            raise _too_large(self._settings)


def _too_large(settings: ServerSettings) -> APIError:
    return APIError(413, f"the body has more than {settings.max_body_bytes} bytes", headers=_CLOSE)


class _Body:
    """Reads a body within limits of size and time."""

    def __init__(self, receive: Receive, settings: ServerSettings) -> None:
        self._receive, self._settings = receive, settings
        self._bytes, self._is_complete = 0, False
        self._deadline = asyncio.get_running_loop().time() + settings.read_timeout

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise APIError(408, "the request did not arrive in time", headers=_CLOSE) from None
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._settings.max_body_bytes:
            raise _too_large(self._settings)
        self._is_complete = not message.get("more_body", False)
        return message
