"""One API request as one or several requests to the engine: submitted together, read together, given up together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Receive

from minifloat.errors import MinifloatError
from minifloat.serve.engine import Delivery, Request
from minifloat.serve.server.errors import APIError

if TYPE_CHECKING:
    from minifloat.serve.engine import AsyncEngine, RequestStream

_Result = TypeVar("_Result")


class Disconnected(Exception):
    """The client has gone; nobody waits for an answer."""


class Generation:
    """The choices of one answer.

    Args:
        streams: One per choice, in the order of their indices.
    """

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._streams = streams

    @classmethod
    async def submit(cls, engine: AsyncEngine, requests: Sequence[Request]) -> Generation:
        """Have all requests admitted, or none.

        Raises:
            QueueFull: There is no room for one of them.
            EngineStopped: The engine takes no more.
            UsageError: One of them can never run.
        """
        # all at once: the engine takes what has come between two steps
        results = await asyncio.gather(*(engine.submit(request) for request in requests), return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        streams = [result for result in results if not isinstance(result, BaseException)]
        if failed:
            cls(streams).cancel()
            raise failed[0]
        return cls(streams)

    def cancel(self) -> None:
        """Give up what is not finished."""
        for stream in self._streams:
            stream.cancel()

    async def deliveries(self) -> AsyncGenerator[tuple[int, Delivery], None]:
        """Deliveries of all choices as they come, each with the index of its choice.

        Raises:
            APIError: The engine could not finish one of them.
        """
        try:
            if len(self._streams) == 1:
                async for delivery in self._streams[0]:
                    yield 0, _checked(delivery)
                return
            async for index, delivery in _merged(self._streams):
                yield index, _checked(delivery)
        finally:
            self.cancel()


def _checked(delivery: Delivery) -> Delivery:
    if delivery.finish_reason == "error":
        raise APIError(500, f"the engine failed on this request: {delivery.error}", code="engine_error")
    if delivery.finish_reason == "cancelled":
        raise APIError(503, "the server is stopping, and this request was not finished in time", code="stopping")
    return delivery


async def _merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, Delivery]]:
    # The queue is short: a stream whose reader is slow joins deliveries, a queue would keep them all.
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
    """The result of `work`, which is cancelled if the client goes away.

    Args:
        receive: Of the ASGI request, whose body has been read.
        work: What the client waits for.

    Raises:
        Disconnected: The client went away first.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Disconnected
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
