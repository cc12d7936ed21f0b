"""Streams to clients that do not read, or have disconnected."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from minifloat.serve.server.errors import APIError
from minifloat.serve.server.generation import EventStream, Generation


class _Stream:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


async def _never(*_: Any) -> Any:
    await asyncio.Event().wait()


async def _events() -> AsyncGenerator[bytes, None]:
    while True:
        yield b"data: x\n\n"


def _failure(error: APIError) -> bytes:
    return error.detail.encode()


def test_a_stream_to_a_client_that_does_not_read_ends_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minifloat.serve.server.generation._LAST_EVENT_SECONDS", 0.05)
    stream: Any = _Stream()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 3:
            await _never()

    answer = EventStream(_events(), Generation([stream]), 0.1, _failure)
    asyncio.run(asyncio.wait_for(answer({"type": "http"}, _never, send), 10))
    assert stream.cancelled
    assert len(sent) == 5, "the start, two events, one that was not taken, and the error"


def test_a_client_that_disconnects_before_the_first_event_cancels_its_request() -> None:
    stream: Any = _Stream()

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    answer = EventStream(_events(), Generation([stream]), 10, _failure)
    asyncio.run(asyncio.wait_for(answer({"type": "http"}, gone, _never), 10))
    assert stream.cancelled


def test_pings_fill_the_pauses_of_a_stream_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minifloat.serve.server.generation._PING_SECONDS", 0.02)
    sent: list[Any] = []
    pinged = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"first"
        await pinged.wait()
        yield b"last"

    async def send(message: Any) -> None:
        sent.append(message.get("body"))
        if sent.count(b"ping") == 2:
            pinged.set()

    for ping in (b"ping", b""):
        sent.clear()
        pinged.clear()
        if not ping:
            pinged.set()
        stream: Any = _Stream()
        answer = EventStream(events(), Generation([stream]), 10, _failure, ping)
        asyncio.run(asyncio.wait_for(answer({"type": "http"}, _never, send), 10))
        assert sent == [None, b"first", *[ping] * (2 if ping else 0), b"last", b""]


@pytest.mark.parametrize("turns", range(5))
def test_a_submission_that_is_cancelled_leaves_no_request_behind(turns: int) -> None:
    streams: list[_Stream] = []

    class Engine:
        async def submit(self, request: Any) -> _Stream:
            streams.append(_Stream())
            return streams[-1]

    async def submit() -> None:
        task = asyncio.create_task(Generation.submit(Engine(), [None, None]))  # type: ignore[arg-type,list-item]
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await task).cancel()

    asyncio.run(submit())
    assert all(stream.cancelled for stream in streams)
