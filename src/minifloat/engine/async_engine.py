"""The engine for a server: the engine steps in a thread of its own, and every request is an asynchronous stream.

All calls of the engine run in that thread; the event loop only puts commands into a queue. A delivery that has not been
read yet is joined with the next one: a slow reader costs no memory but that of its text.
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

from minifloat.engine.engine import Engine
from minifloat.engine.grammar import GrammarState
from minifloat.engine.sampling import SamplingParams
from minifloat.engine.sequence import Delivery, Request, Sequence
from minifloat.errors import EngineStopped, KernelUnavailable, QueueFull, UsageError
from minifloat.kernels.threads import release

_LOG = logging.getLogger(__name__)


class RequestStream:
    """The deliveries of one request; made by `AsyncEngine.submit`."""

    def __init__(self, engine: AsyncEngine, request_id: str) -> None:
        self._engine = engine
        self.request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._waiting: Delivery | None = None
        self._finished = False

    def put(self, delivery: Delivery) -> None:
        """Add a delivery; called in the event loop."""
        if self._finished:
            return
        self._waiting = delivery if self._waiting is None else self._waiting + delivery
        self._finished = delivery.finish_reason is not None
        self._ready.set()

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        """Yield deliveries until the last, which has a `finish_reason`."""
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
        """Whether the last delivery has arrived (it may not have been read yet)."""
        return self._finished

    def cancel(self) -> None:
        """End the request; the last delivery has the reason "cancelled". A request that has ended stays as it is."""
        if not self._finished:
            self._engine.cancel(self.request_id)


class AsyncEngine:
    """Owns an engine. Use it as ``async with AsyncEngine(Engine(path)) as engine``, or `start` and `close` it.

    Args:
        engine: The engine; nothing else may call it from `start` on.
        max_queue: Requests that may wait beside those that run.

    Attributes:
        engine: The engine; only what never changes may be used: `info`, `tokenizer`, `check`.
    """

    def __init__(self, engine: Engine, max_queue: int = 256) -> None:
        self.engine = engine
        self.max_queue = max_queue
        self._commands: queue.SimpleQueue[tuple[str, Any, Future[None] | None]] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._ended = False
        self.draining = False

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def running(self) -> int:
        """Requests that are being decoded."""
        return self.engine.running

    @property
    def kv_usage(self) -> float:
        """The share of the KV cache's blocks that are in use."""
        return self.engine.kv_usage

    @property
    def waiting(self) -> int:
        """Requests that have been submitted and do not run."""
        return max(len(self._streams) - self.engine.running, 0)

    async def start(self) -> None:
        """Start the thread. The OpenMP threads of the calling thread, which may have loaded the model, are released.

        llguidance reads the tokenizer meanwhile, if it has not: once requests are running, that would hold them up.
        """
        release()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="minifloat-engine", daemon=True)
        self._thread.start()
        threading.Thread(target=self._prepare_grammars, name="minifloat-grammars", daemon=True).start()

    def _prepare_grammars(self) -> None:
        with suppress(KernelUnavailable):  # a request with a grammar says why
            self.engine.prepare_grammars()

    async def submit(self, request: Request) -> RequestStream:
        """Submit a request.

        Raises:
            QueueFull: If `max_queue` requests are waiting.
            EngineStopped: If the engine is closed, or about to be.
            UsageError: If the request cannot run.
            KernelUnavailable: If the request has a grammar, and llguidance is missing or cannot read the tokenizer.
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
            sequence, grammar = await self._begin(request)
            self._commands.put(("add", sequence, added))
            if self._ended:
                self._refuse_commands()
            await asyncio.wrap_future(added)
            if grammar is not None:
                await asyncio.wrap_future(grammar.ready)  # the prompt is computed meanwhile
        except BaseException:  # the command was refused, no grammar came of it, or the caller was cancelled meanwhile
            self._streams.pop(request.request_id, None)
            self.cancel(request.request_id)
            raise
        return stream

    async def _begin(self, request: Request) -> tuple[Sequence, GrammarState | None]:
        """Return the sequence of a request, and the state of its grammar, which is compiled from now on."""
        if request.params.grammar is None:
            return self.engine.begin(request), None
        await asyncio.to_thread(self.engine.prepare_grammars)
        grammar = self.engine.compile(request.params.grammar)
        try:
            return self.engine.begin(request, grammar), grammar
        except BaseException:
            grammar.close()
            raise

    async def generate(
        self, prompt: str | Sequences[int], params: SamplingParams | None = None
    ) -> AsyncGenerator[Delivery, None]:
        """Continue a prompt.

        Args:
            prompt: A text, without a chat template, or token ids.
            params: Sampling parameters; by default `Engine.default_params()`.

        Returns:
            The deliveries as they are made. Closing the generator, as cancelling its task does, cancels the request.

        Raises:
            QueueFull: As `submit`.
            EngineStopped: As `submit`.
            UsageError: As `submit`.
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
        """End a request, if it has not ended."""
        self._commands.put(("cancel", request_id, None))

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let the others run for `drain_seconds`, cancel the rest, and stop the thread."""
        self.draining = True
        end = time.monotonic() + drain_seconds
        while self._streams and self.alive and time.monotonic() < end:
            await asyncio.sleep(0.01)
        for name in list(self._streams):
            self.cancel(name)
        self._commands.put(("stop", None, None))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self.engine.close)
        await asyncio.sleep(0)  # the last deliveries are on their way to the loop

    def _work(self) -> None:
        """Run the thread: commands first, then a step."""
        try:
            while not self._stopping:
                self._obey()
                if self.engine.has_work:
                    self._hand_out(self.engine.step())
        except Exception as error:
            _LOG.exception("the engine has stopped")
            self._hand_out([Delivery(name, finish_reason="error", error=str(error)) for name in list(self._streams)])
        finally:
            self._ended = True
            self._refuse_commands()

    def _refuse_commands(self) -> None:
        """Refuse the commands in the queue; both threads call this, for a command may come while the thread ends."""
        with suppress(queue.Empty):
            while True:
                _, subject, done = self._commands.get_nowait()
                if done is None:
                    continue
                self.engine.discard(subject)
                if done.set_running_or_notify_cancel():
                    done.set_exception(EngineStopped("the engine has stopped"))

    def _obey(self) -> None:
        """Execute the commands in the queue; wait for one if there is no other work."""
        wait = not self.engine.has_work
        while wait or not self._commands.empty():
            kind, subject, done = self._commands.get()
            wait = False
            if kind == "stop":
                self._stopping = True
                return
            if kind == "cancel":
                delivery = self.engine.cancel(subject)
                if delivery is not None:
                    self._hand_out([delivery])
            elif done is not None:
                self._add(subject, done)

    def _add(self, sequence: Sequence, done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            self.engine.discard(sequence)
            return
        try:
            self.engine.add(sequence)
        except Exception as error:  # passed on to the caller
            self.engine.discard(sequence)
            done.set_exception(error)
        else:
            done.set_result(None)

    def _hand_out(self, deliveries: list[Delivery]) -> None:
        """Pass the deliveries of a step to the event loop, in one call."""
        if deliveries and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._put, deliveries)

    def _put(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            stream = self._streams.get(delivery.request_id)
            if stream is None:
                continue
            if delivery.finish_reason is not None:
                del self._streams[delivery.request_id]
            stream.put(delivery)
