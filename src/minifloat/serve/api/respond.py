"""The way of every request that generates, whatever API it came by: submitted, parsed, and answered or streamed.

A response is made only once the engine has admitted all answers, so that a full queue is a 503 and not a broken stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request as HTTPRequest
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from minifloat.engine import TokenUsage
from minifloat.serve.api.answers import CollectedAnswer, Parser, Piece, PlainText, TextScores, Writer, total_usage
from minifloat.serve.api.sampling import Sampling
from minifloat.serve.dialog.conversation import Conversation
from minifloat.serve.server.errors import APIError
from minifloat.serve.server.generation import Disconnected, EventStream, Generation, timeout_error, unless_disconnected
from minifloat.serve.server.service import Service


async def respond_to(
    conversation: Conversation,
    sampling: Sampling,
    writer: Writer,
    *,
    service: Service,
    caller: HTTPRequest,
    stream: bool,
) -> Response:
    """Return the response to a conversation."""
    dialog = await service.prompts.encode_chat(conversation)
    sampling = replace(sampling, **await service.prompts.run_in_thread(dialog.sampling))
    parser = dialog.parser if dialog.is_parsed else PlainText
    return await respond(
        [dialog.prompt], sampling, writer, service=service, caller=caller, stream=stream, parser=parser
    )


async def respond(
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    writer: Writer,
    *,
    service: Service,
    caller: HTTPRequest,
    stream: bool,
    parser: Callable[[], Parser] = PlainText,
) -> Response:
    """Return the response to prompts: `sampling.n` answers to each, read by a parser of its own each."""
    generation = await service.submit(writer.name, prompts, sampling, caller)
    writer.prompts = prompts
    parsers = [parser() for _ in range(len(prompts) * sampling.n)]
    scores = [TextScores() for _ in parsers] if writer.scores_text else []
    pieces, seconds = _pieces(generation, parsers, scores), service.settings.request_timeout
    if stream:
        events = _events(pieces, writer, len(parsers), sampling.n)
        return EventStream(events, generation, seconds, writer.failure, writer.ping)
    try:
        async with asyncio.timeout(seconds):
            answers = await unless_disconnected(caller.receive, _collected(pieces, len(parsers)))
        usage = total_usage(answers, sampling.n)
        if sampling.returns_ids or sampling.logprobs is not None:
            return await asyncio.to_thread(_large, writer, answers, usage)
        return JSONResponse(writer.answer(answers, usage).model_dump(exclude_unset=True))
    except TimeoutError:
        raise timeout_error(seconds) from None
    except Disconnected:
        return Response(status_code=499)  # no client reads it; the status is for the log
    finally:
        generation.cancel()


def _large(writer: Writer, answers: Sequence[CollectedAnswer], usage: TokenUsage) -> Response:
    """Return a whole answer that may take a second to write; other threads can run meanwhile."""
    # `model_dump` and `json.dumps` are single calls, during which no other Python code runs
    body = writer.answer(answers, usage)
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_set_fields)
    pieces = encoder.iterencode(body)
    return Response("".join(pieces).encode(), media_type="application/json")


def _set_fields(body: BaseModel) -> dict[str, Any]:
    return {name: value for name, value in body if name in body.model_fields_set}


async def _pieces(
    generation: Generation, parsers: Sequence[Parser], scores: Sequence[TextScores]
) -> AsyncGenerator[tuple[int, Piece], None]:
    ended = 0
    async with contextlib.aclosing(generation.deliveries()) as deliveries:
        async for index, delivery in deliveries:
            events = parsers[index].add(delivery.text) if delivery.text else []
            if delivery.finish_reason is not None:
                ended += 1
                events = [*events, *parsers[index].finish()]
            if scores:
                events = scores[index].add(events, delivery.logprobs or ())
            yield index, Piece(events, delivery)
    if ended < len(parsers):
        raise APIError(500, "the engine ended without a finish reason", code="engine_error")


async def _collected(pieces: AsyncGenerator[tuple[int, Piece], None], count: int) -> list[CollectedAnswer]:
    answers = [CollectedAnswer() for _ in range(count)]
    async with contextlib.aclosing(pieces):
        async for index, piece in pieces:
            answers[index].add(piece)
    return answers


async def _events(
    pieces: AsyncGenerator[tuple[int, Piece], None], writer: Writer, count: int, per_prompt: int
) -> AsyncGenerator[bytes, None]:
    answers = [CollectedAnswer() for _ in range(count)]
    for event in writer.opening():
        yield writer.encode(event)
    async with contextlib.aclosing(pieces):
        async for index, piece in pieces:
            answers[index].end(piece)
            for event in writer.piece(index, piece):
                yield writer.encode(event)
    for event in writer.closing(total_usage(answers, per_prompt)):
        yield writer.encode(event)
    if writer.end:
        yield writer.end
