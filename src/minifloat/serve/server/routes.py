"""The routes: completions and chats, models, health, metrics, tokens, the status page.

Those that generate answer only once the engine has admitted all choices, so that a full queue is a 503 and not a broken
stream. Then they collect the deliveries into one answer, or stream them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncGenerator
from importlib import resources
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import HTMLResponse, JSONResponse, Response

from minifloat._version import __version__
from minifloat.serve.server.answers import (
    ChatChunk,
    ChatCompletion,
    ChatWriter,
    CollectedChoice,
    Completion,
    EchoedPrompt,
    Health,
    ModelCard,
    ModelList,
    Text,
    TextWriter,
    Tokens,
    Usage,
    Version,
    Writer,
)
from minifloat.serve.server.errors import APIError, ErrorBody
from minifloat.serve.server.generation import Disconnected, EventStream, Generation, timeout_error, unless_disconnected
from minifloat.serve.server.protocol import (
    TOKEN_TITLE,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingRequest,
    TokenizeRequest,
)
from minifloat.serve.server.service import BoundedRoute, Service, require_json

_MEANINGS = {
    400: "The request can never work; `param` names the field.",
    401: "No valid API key.",
    403: "A host name that this server does not answer to.",
    404: "An unknown model, or an unknown path.",
    408: "The request took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    503: "The queue is full, or the server is stopping; see Retry-After.",
    504: "Not finished in time.",
}
_GUARDED = (401, 403)
_WITH_BODY = (*_GUARDED, 400, 404, 408, 413, 415)


def failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorBody, "description": _MEANINGS[status]} for status in statuses}


def text(media_type: str, description: str) -> dict[int | str, dict[str, Any]]:
    success: dict[int | str, dict[str, Any]] = {
        200: {"description": description, "content": {media_type: {"schema": {"type": "string"}}}}
    }
    return success | failures(*_GUARDED)


def answers(model: type[BaseModel], *, with_body: bool = False) -> dict[int | str, dict[str, Any]]:
    success: dict[int | str, dict[str, Any]] = {200: {"model": model}}
    return success | failures(*(_WITH_BODY if with_body else _GUARDED))


def streamed(model: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    events = {"example": f"data: ({chunk.__name__} as JSON)\n\ndata: [DONE]\n\n"}
    success: dict[int | str, dict[str, Any]] = {200: {"model": model, "content": {"text/event-stream": events}}}
    return success | failures(*_WITH_BODY, 503, 504)


def describe(document: dict[str, Any], name: str, vocab_size: int) -> None:
    """Write the served model's name and its largest token id into the document."""
    for schema in document["components"]["schemas"].values():
        field = schema.get("properties", {}).get("model")
        if field is not None and schema["title"].endswith("Request"):
            optional = [{"type": "null"}] if "anyOf" in field else []
            field.clear()
            field |= {"title": "Model", "anyOf": [{"enum": [name]}, *optional]}
        _bound_tokens(schema, vocab_size)
    for parameter in document["paths"]["/v1/models/{name}"]["get"]["parameters"]:
        parameter["schema"] = {"title": "Name", "enum": [name]}


def _bound_tokens(schema: Any, vocab_size: int) -> None:
    if isinstance(schema, dict):
        if schema.get("title") == TOKEN_TITLE:
            schema["maximum"] = vocab_size - 1
        for value in schema.values():
            _bound_tokens(value, vocab_size)
    elif isinstance(schema, list):
        for value in schema:
            _bound_tokens(value, vocab_size)


router = APIRouter(route_class=BoundedRoute, tags=["server"])
openai_router = APIRouter(route_class=BoundedRoute, tags=["OpenAI"], dependencies=[Depends(require_json)])

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@openai_router.post("/v1/completions", response_model=None, responses=streamed(Completion, Completion))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several texts."""
    service = _service(request)
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


@openai_router.post("/v1/chat/completions", response_model=None, responses=streamed(ChatCompletion, ChatChunk))
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Continue a conversation."""
    service = _service(request)
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
    request: Request,
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
    """Return a whole answer that may take a second to write; other threads can run meanwhile."""
    # `model_dump` and `json.dumps` are single calls, during which no other Python code runs
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


@router.get("/health", responses=answers(Health) | failures(503))
async def health(request: Request) -> Health:
    """Whether the process is alive and its engine runs. Needs no API key."""
    if not _service(request).engine.alive:
        raise APIError(503, "the engine has stopped", code="stopping")
    return Health()


@router.get("/ready", responses=answers(Health) | failures(503))
async def ready(request: Request) -> Health:
    """Whether the server admits requests."""
    engine = _service(request).engine
    if engine.draining or not engine.alive:
        raise APIError(503, "the server is stopping", code="stopping")
    return Health()


@router.get("/version", responses=answers(Version))
async def version() -> Version:
    """The version of minifloat."""
    return Version(version=__version__)


@router.get("/metrics", response_class=Response, responses=text(_PROMETHEUS, "Prometheus' text format"))
async def metrics(request: Request) -> Response:
    """Counts, gauges and histograms."""
    return Response(_service(request).metrics.text(), headers={"content-type": _PROMETHEUS})


@router.get("/status", responses=failures(401, 403))
async def status(request: Request) -> dict[str, Any]:
    """The data of the page at /: the model, and the last minute."""
    service = _service(request)
    model = service.info.to_dict()
    del model["path"]  # a path of this machine, which clients need not know
    model |= {"name": service.settings.model_name, "chat": service.prompts.has_template}
    return {"version": __version__, "model": model, "now": service.metrics.recent()}


@router.get("/v1/models", responses=answers(ModelList))
async def models(request: Request) -> ModelList:
    """The served model."""
    return ModelList(data=[_card(_service(request))])


@router.get("/v1/models/{name:path}", responses=answers(ModelCard) | failures(404))
async def model(name: str, request: Request) -> ModelCard:
    """The served model, by its name."""
    _service(request).check_model(name)
    return _card(_service(request))


def _card(service: Service) -> ModelCard:
    return ModelCard(id=service.settings.model_name, created=service.created, max_model_len=service.info.max_model_len)


@router.post("/tokenize", responses=answers(Tokens, with_body=True), dependencies=[Depends(require_json)])
async def tokenize(body: TokenizeRequest, request: Request) -> Tokens:
    """The tokens of a text, or of messages through the chat template."""
    service = _service(request)
    service.check_model(body.model)
    if body.messages is not None:
        tokens = await service.prompts.encode_chat(body.messages, {})
    else:
        tokens = await service.prompts.encode(
            body.prompt or "", add_special_tokens=body.add_special_tokens, may_be_empty=True
        )
    pieces = await service.prompts.pieces(tokens) if body.return_token_strs else None
    return Tokens(count=len(tokens), max_model_len=service.info.max_model_len, tokens=list(tokens), token_strs=pieces)


@router.post("/detokenize", responses=answers(Text, with_body=True), dependencies=[Depends(require_json)])
async def detokenize(body: DetokenizeRequest, request: Request) -> Text:
    """The text of tokens, special tokens included."""
    service = _service(request)
    service.check_model(body.model)
    return Text(prompt=await service.prompts.decode(body.tokens))


_PAGE = resources.files("minifloat.serve.server").joinpath("page.html").read_text(encoding="utf-8")


def _policy(page: str) -> str:
    """Return a content security policy that allows the page's own script and style, and requests to this server."""

    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_PAGE_HEADERS = {
    "content-security-policy": _policy(_PAGE),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def page() -> HTMLResponse:
    """The status page. It holds no data: it requests the data from /status, with a key if one is needed."""
    return HTMLResponse(_PAGE, headers=_PAGE_HEADERS)
