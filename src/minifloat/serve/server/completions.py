"""``POST /v1/completions`` and ``POST /v1/chat/completions``.

Both answer only once the engine has admitted all choices, so that a full queue is a 503 and not a broken stream. Then
they collect the deliveries into one answer, or stream them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Depends
from fastapi import Request as HTTPRequest
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from minifloat.serve.server.answers import ChatChunk, ChatCompletion, Completion, Usage
from minifloat.serve.server.errors import APIError
from minifloat.serve.server.generation import Disconnected, EventStream, Generation, timeout_error, unless_disconnected
from minifloat.serve.server.openapi import streamed
from minifloat.serve.server.protocol import ChatCompletionRequest, CompletionRequest, SamplingRequest
from minifloat.serve.server.service import BoundedRoute, Service, require_json
from minifloat.serve.server.writers import ChatWriter, CollectedChoice, EchoedPrompt, TextWriter, Writer

router = APIRouter(route_class=BoundedRoute, tags=["OpenAI"], dependencies=[Depends(require_json)])


@router.post("/v1/completions", response_model=None, responses=streamed(Completion, Completion))
async def create_completion(body: CompletionRequest, request: HTTPRequest) -> Response:
    """Continue one or several texts."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    texts = body.prompts()
    prompts = [await service.prompts.encode(text, add_special_tokens=body.add_special_tokens) for text in texts]
    echoed = [EchoedPrompt()] * len(texts)
    if body.echo:
        echoed = [
            EchoedPrompt(
                text if isinstance(text, str) else await service.prompts.decode(text),
                await service.prompts.decode(prompt[:1]),
                prompt[0] if prompt else 0,
            )
            for text, prompt in zip(texts, prompts, strict=True)
        ]
    prompt_logprobs = body.logprobs if body.echo else None
    name, generation = await service.submit(prompts, body, body.logprobs, request, prompt_logprobs=prompt_logprobs)
    writer = TextWriter(
        f"cmpl-{name}",
        service.settings.model_name,
        prompts=[prompt for prompt in echoed for _ in range(body.n)],
        logprobs=body.logprobs is not None,
        with_usage=_wants_usage(body),
        as_ids=body.return_tokens_as_token_ids,
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
        choices=body.n,
        logprobs=body.logprobs,
        with_usage=_wants_usage(body),
    )
    return await _respond(service, body, request, generation, writer, body.n)


def _wants_usage(body: SamplingRequest) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


async def _respond(
    service: Service,
    body: SamplingRequest,
    request: HTTPRequest,
    generation: Generation,
    writer: Writer,
    num_choices: int,
) -> Response:
    choices = [CollectedChoice() for _ in range(num_choices)]
    seconds = service.settings.request_timeout
    if body.stream:
        return EventStream(_events(body, generation, writer, choices), generation, seconds)
    try:
        async with asyncio.timeout(seconds):
            await unless_disconnected(request.receive, _collect(generation, choices))
        if any(choice.prompt_logprobs for choice in choices):
            return await asyncio.to_thread(_large, writer, choices, body.n)
        return JSONResponse(writer.answer(choices, _usage(choices, body.n)).model_dump())
    except TimeoutError:
        raise timeout_error(seconds) from None
    except Disconnected:
        return Response(status_code=499)  # no client reads it; the status is for the log
    finally:
        generation.cancel()


def _large(writer: Writer, choices: list[CollectedChoice], per_prompt: int) -> Response:
    """Return a whole answer that may take a second to write; other threads can run meanwhile.

    `model_dump` and `json.dumps` are single calls, during which no other Python code runs.
    """
    answer = writer.answer(choices, _usage(choices, per_prompt))
    pieces = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict).iterencode(
        answer
    )
    return Response("".join(pieces).encode(), media_type="application/json")


async def _collect(generation: Generation, choices: list[CollectedChoice]) -> None:
    async with contextlib.aclosing(generation.deliveries()) as deliveries:
        async for index, delivery in deliveries:
            choices[index].add(delivery)
    _check_ended(choices)


async def _events(
    body: SamplingRequest, generation: Generation, writer: Writer, choices: list[CollectedChoice]
) -> AsyncGenerator[BaseModel, None]:
    for chunk in writer.opening():
        yield chunk
    async with contextlib.aclosing(generation.deliveries()) as deliveries:
        async for index, delivery in deliveries:
            if delivery.finish_reason is not None:
                choices[index].add(delivery)
            if delivery.text or delivery.logprobs or delivery.prompt_logprobs or delivery.finish_reason is not None:
                yield writer.chunk(index, delivery)
    _check_ended(choices)
    if _wants_usage(body):
        yield writer.last(_usage(choices, body.n))


def _usage(choices: list[CollectedChoice], per_prompt: int) -> Usage:
    return Usage.of([choice.usage for choice in choices], per_prompt)


def _check_ended(choices: list[CollectedChoice]) -> None:
    if any(choice.finish_reason is None for choice in choices):
        raise APIError(500, "the engine ended without a finish reason", code="engine_error")
