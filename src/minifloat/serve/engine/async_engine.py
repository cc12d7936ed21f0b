"""The engine for a server: it steps in a thread of its own, and every request is an asynchronous stream.

Whatever touches the engine runs in that thread; the event loop only puts wishes into a queue. Deliveries wait in one
slot per request, where later ones join those that have not been taken yet: a slow reader costs no memory but its text.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from collections.abc import Sequence as Sequences
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from minifloat.errors import EngineStopped, QueueFull, UsageError
from minifloat.kernels.threads import release
from minifloat.serve.engine.engine import Engine
from minifloat.serve.engine.sampling import SamplingParams
from minifloat.serve.engine.sequence import Delivery, Request, Sequence

_LOG = logging.getLogger(__name__)


class RequestStream:
    """The deliveries of one request; made by `AsyncEngine.submit`.

    Iterate over it once. Leaving the loop early does not cancel; `cancel` does, and so does `aclose`.
    """

    def __init__(self, engine: AsyncEngine, request_id: str) -> None:
        self._engine = engine
        self.request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._waiting: Delivery | None = None
        self._finished = False

    def put(self, delivery: Delivery) -> None:
        """Called in the event loop."""
        if self._finished:
            return
        self._waiting = delivery if self._waiting is None else self._waiting + delivery
        self._finished = delivery.finish_reason is not None
        self._ready.set()

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        """The deliveries until the last, which has a `finish_reason`."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            delivery, self._waiting = self._waiting, None
            if delivery is not None:
                yield delivery
                if delivery.finish_reason is not None:
                    return

    @property
    def finished(self) -> bool:
        """Whether the last delivery has come (it may not have been taken yet)."""
        return self._finished

    def cancel(self) -> None:
        """End the request; its last delivery says so. Nothing happens where it has ended already."""
        if not self._finished:
            self._engine.cancel(self.request_id)


class AsyncEngine:
    """Owns an engine. Use it as ``async with AsyncEngine(Engine(path)) as engine``, or `start` and `close` it.

    Args:
        engine: Nobody else may call it from `start` on.
        max_queue: Requests that may wait beside those that run.

    Attributes:
        engine: For what does not change: `info`, `tokenizer`, `check`.
    """

    def __init__(self, engine: Engine, max_queue: int = 256) -> None:
        self.engine = engine
        self.max_queue = max_queue
        self._wishes: queue.SimpleQueue[tuple[str, Any, Future[None] | None]] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._ended = False
        self.draining = False
        self.last_step = time.monotonic()

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def running(self) -> int:
        """Requests that are being decoded."""
        return self.engine.running

    @property
    def waiting(self) -> int:
        """Requests that have been submitted and do not run."""
        return max(len(self._streams) - self.engine.running, 0)

    async def start(self) -> None:
        """Start the thread. The calling one, which may have loaded the model, gives its own team of threads back."""
        release()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="minifloat-engine", daemon=True)
        self._thread.start()

    async def submit(self, request: Request) -> RequestStream:
        """Hand in a request.

        Raises:
            QueueFull: As many wait as may.
            EngineStopped: It is closed, or about to be.
            UsageError: The request cannot run.
            KernelUnavailable: It has a grammar, and there is nothing to follow it with.
        """
        if self.draining or not self.alive:
            raise EngineStopped("the engine is shutting down" if self.draining else "the engine is not running")
        if len(self._streams) >= self.max_queue + self.engine.info.max_num_seqs:
            raise QueueFull(f"{self.max_queue} requests are waiting already; try again later")
        if request.request_id in self._streams:
            raise UsageError(f"request_id: {request.request_id!r} is at work already")
        stream = RequestStream(self, request.request_id)
        added: Future[None] = Future()
        self._streams[request.request_id] = stream
        try:
            begin = self.engine.begin
            sequence = begin(request) if request.params.grammar is None else await asyncio.to_thread(begin, request)
            self._wishes.put(("add", sequence, added))
            if self._ended:
                self._refuse_wishes()
            await asyncio.wrap_future(added)
        except BaseException:  # a wish that was refused, or a caller that went away meanwhile
            self._streams.pop(request.request_id, None)
            self.cancel(request.request_id)
            raise
        return stream

    async def generate(
        self, prompt: str | Sequences[int], params: SamplingParams | None = None
    ) -> AsyncGenerator[Delivery, None]:
        """Continue a prompt.

        Args:
            prompt: A text, without a chat template, or token ids.
            params: By default `SamplingParams()` with the checkpoint's own defaults.

        Returns:
            The deliveries as they are made. Closing the generator, as cancelling its task does, cancels the request.

        Raises:
            QueueFull: As `submit`, and so are the others.
            EngineStopped: As there.
            UsageError: As there.
        """
        tokens = self.engine.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        params = params or self.engine.default_params()
        stream = await self.submit(Request(f"generate-{uuid.uuid4()}", tokens, params))
        try:
            async for delivery in stream:
                yield delivery
        finally:
            stream.cancel()

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def cancel(self, request_id: str) -> None:
        """End a request, if it is still there."""
        self._wishes.put(("cancel", request_id, None))

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, let those at work finish for so long, cancel the rest, and stop the thread."""
        self.draining = True
        end = time.monotonic() + drain_seconds
        while self._streams and self.alive and time.monotonic() < end:
            await asyncio.sleep(0.01)
        for name in list(self._streams):
            self.cancel(name)
        self._wishes.put(("stop", None, None))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)  # the last deliveries are on their way to the loop

    def _work(self) -> None:
        """The thread: wishes first, then a step."""
        try:
            while not self._stopping:
                self._grant()
                if self.engine.has_work:
                    self._hand_out(self.engine.step())
                    self.last_step = time.monotonic()
        except Exception as error:
            _LOG.exception("the engine has stopped")
            self._hand_out([Delivery(name, finish_reason="error", error=str(error)) for name in list(self._streams)])
        finally:
            self._ended = True
            self._refuse_wishes()

    def _refuse_wishes(self) -> None:
        """Tell those whose wishes nobody grants any more; both threads do, for a wish may come at the very end."""
        with suppress(queue.Empty):
            while True:
                _, _, done = self._wishes.get_nowait()
                if done is not None and done.set_running_or_notify_cancel():
                    done.set_exception(EngineStopped("the engine has stopped"))

    def _grant(self) -> None:
        """Do what was wished; wait for a wish where there is nothing else to do."""
        wait = not self.engine.has_work
        while wait or not self._wishes.empty():
            kind, what, done = self._wishes.get()
            wait = False
            if kind == "stop":
                self._stopping = True
                return
            if kind == "cancel":
                delivery = self.engine.cancel(what)
                if delivery is not None:
                    self._hand_out([delivery])
            elif done is not None:
                self._add(what, done)

    def _add(self, sequence: Sequence, done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            self.engine.add(sequence)
        except Exception as error:  # the caller's to handle
            done.set_exception(error)
        else:
            done.set_result(None)

    def _hand_out(self, deliveries: list[Delivery]) -> None:
        """Give deliveries to the event loop, all of a step at once."""
        if deliveries and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._put, deliveries)

    def _put(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            stream = self._streams.get(delivery.request_id)
            if stream is None:
                continue
            if delivery.finish_reason is not None:
                del self._streams[delivery.request_id]
            stream.put(delivery)
