"""The way of every request whose texts become vectors or scores: tokenized, submitted in groups, collected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request as HTTPRequest
from pydantic import BaseModel
from starlette.responses import Response

from minifloat.engine.pooling import Vector
from minifloat.errors import ContextLengthError, QueueFull, UsageError
from minifloat.serve.api.sampling import Sampling
from minifloat.serve.server.errors import APIError
from minifloat.serve.server.generation import Disconnected, Generation, timeout_error, unless_disconnected
from minifloat.serve.server.service import Service

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 1 << 19  #: of all texts of a request
MAX_INPUT_CHARACTERS = 1 << 23
#: Texts of a request that are at work at a time, so that those of others run beside them.
_GROUP = 32
_RETRY_SECONDS = 0.05

_Result = TypeVar("_Result")


class VectorUsage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]]) -> VectorUsage:
        tokens = sum(map(len, prompts))
        return cls(prompt_tokens=tokens, total_tokens=tokens)


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        service: Of the server.
        request: That is answered.
        name: Of the request, for ids.
        priority: Of the texts of all requests that wait, those of the lowest are next.
    """

    service: Service
    request: HTTPRequest
    name: str
    priority: int = 0


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Let errors name a field of the request where the engine says `prompt`."""
    try:
        yield
    except (ContextLengthError, UsageError) as error:
        cause, colon, reason = str(error).partition(":")
        if cause not in ("prompt", "messages") or not colon:
            raise
        raise type(error)(f"{field}:{reason}") from error


async def encode_all(
    count: int, encode: Callable[[int], Awaitable[tuple[int, ...]]], field: str
) -> list[tuple[int, ...]]:
    """Return the tokens of texts, which `encode` returns by their index."""
    prompts, total = [], 0
    with naming(field):
        for index in range(count):
            prompts.append(await encode(index))
            total += len(prompts[-1])
            if total > MAX_INPUT_TOKENS:
                raise UsageError(f"{field}: more than {MAX_INPUT_TOKENS} tokens; send fewer texts at a time")
    return prompts


async def answer_with_vectors(
    prompts: Sequence[tuple[int, ...]], caller: Caller, field: str, write: Callable[[list[Vector]], Response]
) -> Response:
    """Return what `write` makes, in a thread, of the vectors or scores of prompts."""
    seconds = caller.service.settings.request_timeout
    try:
        async with asyncio.timeout(seconds):
            with naming(field):
                return await unless_disconnected(caller.request.receive, _written(prompts, caller, write))
    except TimeoutError:
        raise timeout_error(seconds) from None
    except Disconnected:
        return Response(status_code=499)  # no client reads it; the status is for the log


async def _written(
    prompts: Sequence[tuple[int, ...]], caller: Caller, write: Callable[[list[Vector]], Response]
) -> Response:
    vectors: list[Vector] = []
    size = min(_GROUP, caller.service.info.max_num_seqs)
    async with _turn(caller.service, is_large=len(prompts) > size):
        for start in range(0, len(prompts), size):
            vectors += await _group(prompts[start : start + size], caller, start)
        return await asyncio.to_thread(write, vectors)


@asynccontextmanager
async def _turn(service: Service, *, is_large: bool) -> AsyncIterator[None]:
    if not is_large:
        yield
        return
    async with service.large_requests:
        yield


async def _group(prompts: Sequence[tuple[int, ...]], caller: Caller, start: int) -> list[Vector]:
    sampling = Sampling(max_tokens=0, priority=caller.priority)
    generation = await _admitted(prompts, caller, start, sampling)
    vectors: dict[int, Vector] = {}
    try:
        async for index, delivery in generation.deliveries():
            if delivery.pooled is not None:
                vectors[index] = delivery.pooled
    finally:
        generation.cancel()
    if len(vectors) < len(prompts):
        raise APIError(500, "the engine ended without a vector", code="engine_error")
    return [vectors[index] for index in range(len(prompts))]


async def _admitted(prompts: Sequence[tuple[int, ...]], caller: Caller, start: int, sampling: Sampling) -> Generation:
    """Submit a group of prompts. A queue that is full refuses a request at its beginning, and delays it later."""
    while True:
        try:
            return await caller.service.submit(f"{caller.name}-{start}", prompts, sampling, caller.request)
        except QueueFull:
            if not start:
                raise
            await asyncio.sleep(_RETRY_SECONDS)
