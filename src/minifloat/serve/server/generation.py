"""The engine requests of one API request: submitted, read, streamed and cancelled together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minifloat.engine import Delivery, Request
from minifloat.errors import MinifloatError, UsageError
from minifloat.serve.server.errors import APIError, from_minifloat

if TYPE_CHECKING:
    from minifloat.engine import AsyncEngine, RequestStream

_Result = TypeVar("_Result")

_LOG = logging.getLogger("minifloat.server")
#: Seconds in which a client must read the last event of a stream that failed.
_LAST_EVENT_SECONDS = 5.0
#: Seconds without an event after which a stream whose API has pings gets one.
_PING_SECONDS = 10.0


class Disconnected(Exception):
    """The client has disconnected."""


class Generation:
    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._streams = streams
        self.held: Callable[[], None] | None = None

    @classmethod
    async def submit(cls, engine: AsyncEngine, requests: Sequence[Request]) -> Generation:
        """Submit several requests, of which the engine admits all or none."""
        # Submit concurrently: the engine admits all requests that have come between two steps.
        tasks = [asyncio.create_task(engine.submit(request)) for request in requests]
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:  # requests that are not admitted yet withdraw themselves
            admitted = (task for task in tasks if task.done() and not task.cancelled() and task.exception() is None)
            cls([task.result() for task in admitted]).cancel()
            raise
        failed = [result for result in results if isinstance(result, BaseException)]
        streams = [result for result in results if not isinstance(result, BaseException)]
        if failed:
            cls(streams).cancel()
            raise failed[0]
        return cls(streams)

    def cancel(self) -> None:
        """Cancel the choices that are not finished; the answer has been written, or will not be."""
        self._stop()
        held, self.held = self.held, None
        if held is not None:
            held()

    def _stop(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def deliveries(self) -> AsyncGenerator[tuple[int, Delivery], None]:
        """Yield the deliveries of all choices as they come, each with the index of its choice."""
        try:
            if len(self._streams) == 1:
                async for delivery in self._streams[0]:
                    yield 0, _checked(delivery)
                return
            async for index, delivery in _merged(self._streams):
                yield index, _checked(delivery)
        finally:
            self._stop()


def _checked(delivery: Delivery) -> Delivery:
    if delivery.finish_reason == "error" and delivery.caused_by_request:
        raise from_minifloat(UsageError(delivery.error or ""))
    if delivery.finish_reason == "error":
        raise APIError(500, f"the engine failed on this request: {delivery.error}", code="engine_error")
    if delivery.finish_reason == "cancelled":
        raise APIError(503, "the server is stopping, and this request was not finished in time", code="stopping")
    return delivery


async def _merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, Delivery]]:
    # The queue holds one item: a stream with a slow reader joins its deliveries, a long queue would keep them apart.
    queue: asyncio.Queue[tuple[int, Delivery | MinifloatError | None]] = asyncio.Queue(1)

    async def pump(index: int, stream: RequestStream) -> None:
        try:
            async for delivery in stream:
                await queue.put((index, delivery))
            await queue.put((index, None))
        except MinifloatError as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, MinifloatError):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of `work`, or cancel it if the client disconnects."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(disconnect())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Disconnected
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


# Starlette's streaming response lacks three things: the time limit must hold while a client that does not read blocks a
# write, an error during the stream must be an event, and a disconnect must cancel the generation at once.
class EventStream(Response):
    """A response of server-sent events.

    Args:
        events: As the stream carries them.
        generation: That they come from; it is cancelled with the stream.
        seconds: To the end of the stream.
        failure: Returns the last events of a stream that fails.
        ping: What it carries while there is no event; empty: nothing.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        generation: Generation,
        seconds: float,
        failure: Callable[[APIError], bytes],
        ping: bytes = b"",
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._generation, self._seconds, self._failure = events, generation, seconds, failure
        self._ping, self._writing, self._written = ping, asyncio.Lock(), 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(Disconnected):
                await unless_disconnected(receive, self._send(send))
        finally:
            self._generation.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with (
                asyncio.timeout(self._seconds),
                contextlib.aclosing(self._events) as events,
                self._pinging(send),
            ):
                async for event in events:
                    await self._write(event, send)
        except Exception as error:
            self._generation.cancel()
            last = self._failure(_api_error(error, self._seconds))
            try:
                async with asyncio.timeout(_LAST_EVENT_SECONDS):
                    await send(_body(last))
            except TimeoutError:
                return  # the client does not read; returning here closes the connection
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, event: bytes, send: Send) -> None:
        async with self._writing:
            await send(_body(event))
            self._written = time.monotonic()

    @contextlib.asynccontextmanager
    async def _pinging(self, send: Send) -> AsyncIterator[None]:
        """Send pings while no event comes, until the end of the block."""

        async def pinging() -> None:
            while True:
                idle = time.monotonic() - self._written
                if idle >= _PING_SECONDS and not self._writing.locked():
                    await self._write(self._ping, send)
                await asyncio.sleep(max(_PING_SECONDS - idle, _PING_SECONDS / 10))

        self._written = time.monotonic()
        task = asyncio.create_task(pinging()) if self._ping else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


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
    return APIError(504, f"not finished within {seconds:g} s; ask for fewer tokens", code="timeout")


def _body(data: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": True}
