"""``POST /v1/completions`` and ``POST /v1/chat/completions``.

Both have their choices admitted before they answer, so that a full queue is a 503 and not a broken stream; then they
join what comes, or pass it on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Depends
from fastapi import Request as HTTPRequest
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from minifloat.serve.server.answers import ChatChunk, ChatCompletion, Completion, Usage
from minifloat.serve.server.errors import APIError
from minifloat.serve.server.generation import Disconnected, Generation, unless_disconnected
from minifloat.serve.server.openapi import streamed
from minifloat.serve.server.protocol import ChatCompletionRequest, CompletionRequest, SamplingRequest
from minifloat.serve.server.service import Service, require_json
from minifloat.serve.server.sse import EventStream, out_of_time
from minifloat.serve.server.writers import ChatWriter, Collected, Head, TextWriter, Writer

router = APIRouter(tags=["OpenAI"], dependencies=[Depends(require_json)])


@router.post("/v1/completions", response_model=None, responses=streamed(Completion, Completion))
async def create_completion(body: CompletionRequest, request: HTTPRequest) -> Response:
    """Continue one or several texts."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    given = body.prompts()
    prompts = [await service.prompts.encode(one, add_special_tokens=body.add_special_tokens) for one in given]
    heads = [Head()] * len(given)
    if body.echo:
        heads = [
            Head(
                one if isinstance(one, str) else await service.prompts.decode(one),
                await service.prompts.decode(prompt[:1]),
            )
            for one, prompt in zip(given, prompts, strict=True)
        ]
    of_prompt = body.logprobs if body.echo else None
    name, generation = await service.submit(prompts, body, body.logprobs, request, prompt_logprobs=of_prompt)
    writer = TextWriter(
        f"cmpl-{name}",
        service.settings.model_name,
        [head for head in heads for _ in range(body.n)],
        logprobs=body.logprobs is not None,
        with_usage=_wants_usage(body),
    )
    return await _respond(service, body, request, generation, writer, len(prompts) * body.n)


@router.post("/v1/chat/completions", response_model=None, responses=streamed(ChatCompletion, ChatChunk))
async def create_chat_completion(body: ChatCompletionRequest, request: HTTPRequest) -> Response:
    """Continue a conversation."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    prompt = await service.prompts.encode_chat(body.messages, body.template_options())
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    name, generation = await service.submit([prompt], body, logprobs, request)
    writer = ChatWriter(
        f"chatcmpl-{name}",
        service.settings.model_name,
        body.n,
        logprobs=body.logprobs,
        with_usage=_wants_usage(body),
    )
    return await _respond(service, body, request, generation, writer, body.n)


def _wants_usage(body: SamplingRequest) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


async def _respond(
    service: Service, body: SamplingRequest, request: HTTPRequest, generation: Generation, writer: Writer, choices: int
) -> Response:
    """Join what the engine makes, or pass it on."""
    collected = [Collected() for _ in range(choices)]
    seconds = service.settings.request_timeout
    if body.stream:
        return EventStream(_events(body, generation, writer, collected), generation, seconds)
    try:
        async with asyncio.timeout(seconds):
            await unless_disconnected(request.receive, _collect(generation, collected))
    except TimeoutError:
        raise out_of_time(seconds) from None
    except Disconnected:
        return Response(status_code=499)  # nobody reads it; the log does
    finally:
        generation.cancel()
    return JSONResponse(writer.whole(collected, _usage(collected, body.n)).model_dump())


async def _collect(generation: Generation, collected: list[Collected]) -> None:
    async with contextlib.aclosing(generation.deliveries()) as deliveries:
        async for index, delivery in deliveries:
            collected[index].add(delivery)
    _check_ended(collected)


async def _events(
    body: SamplingRequest, generation: Generation, writer: Writer, collected: list[Collected]
) -> AsyncGenerator[BaseModel, None]:
    for chunk in writer.opening():
        yield chunk
    async with contextlib.aclosing(generation.deliveries()) as deliveries:
        async for index, delivery in deliveries:
            if delivery.finish_reason is not None:
                collected[index].add(delivery)
            if delivery.text or delivery.logprobs or delivery.prompt_logprobs or delivery.finish_reason is not None:
                yield writer.chunk(index, delivery)
    _check_ended(collected)
    if _wants_usage(body):
        yield writer.last(_usage(collected, body.n))


def _usage(collected: list[Collected], per_prompt: int) -> Usage:
    return Usage.of([one.usage for one in collected], per_prompt)


def _check_ended(collected: list[Collected]) -> None:
    if any(one.finish_reason is None for one in collected):
        raise APIError(500, "the engine ended without saying why", code="engine_error")
