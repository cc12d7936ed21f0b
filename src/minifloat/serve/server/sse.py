"""Server-sent events: streamed answers.

Starlette's streaming response lacks three things: the time limit must hold while a client that does not read blocks a
write, an error during the stream must be an event, and a disconnect must cancel the generation at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minifloat.errors import MinifloatError
from minifloat.serve.server.errors import APIError, from_minifloat
from minifloat.serve.server.generation import Disconnected, Generation, unless_disconnected

DONE = b"data: [DONE]\n\n"

_LOG = logging.getLogger("minifloat.server")
#: Seconds in which a client must read the last event of a stream that failed.
_LAST_EVENT_SECONDS = 5.0


class EventStream(Response):
    """A response of events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[BaseModel, None], generation: Generation, seconds: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._generation, self._seconds = events, generation, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            with contextlib.suppress(Disconnected):
                await unless_disconnected(receive, self._send(send))
        finally:
            self._generation.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(self._seconds), contextlib.aclosing(self._events) as events:
                async for event in events:
                    await send(_body(_event(event)))
                await send(_body(DONE))
        except Exception as error:
            self._generation.cancel()
            last = _event(_api_error(error, self._seconds).body) + DONE
            try:
                async with asyncio.timeout(_LAST_EVENT_SECONDS):
                    await send(_body(last))
            except TimeoutError:
                return  # the client does not read; returning here closes the connection
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _api_error(error: Exception, seconds: float) -> APIError:
    if isinstance(error, APIError):
        return error
    if isinstance(error, MinifloatError):
        return from_minifloat(error)
    if isinstance(error, TimeoutError):
        return timeout_error(seconds)
    _LOG.error("a streamed answer failed", exc_info=error)
    return APIError(500, "internal server error")


def timeout_error(seconds: float) -> APIError:
    """Return the answer to a request that took too long."""
    return APIError(504, f"not finished within {seconds:g} s; ask for fewer tokens", code="timeout")


def _event(body: BaseModel) -> bytes:
    return b"data: " + body.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def _body(data: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": True}
