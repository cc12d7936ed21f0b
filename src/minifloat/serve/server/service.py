"""The served model, which every route uses: engine, tokenizer, settings, and the submission of requests."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request as HTTPRequest
from fastapi.routing import APIRoute
from starlette.responses import Response

from minifloat.engine import MODEL_DEFAULTS, Grammar, Request, SamplingParams
from minifloat.errors import ContextLengthError, QueueFull
from minifloat.serve.server.errors import APIError, invalid
from minifloat.serve.server.generation import Generation
from minifloat.serve.server.metrics import Metrics
from minifloat.serve.server.prompts import Prompts
from minifloat.serve.server.protocol import (
    MAX_PROMPT_LOGPROBS,
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingRequest,
)
from minifloat.serve.server.settings import ServerSettings

if TYPE_CHECKING:
    from minifloat.engine import AsyncEngine

_SEEDS = 2**64
#: Commas in a body. Parsing JSON is one call, during which no other Python code runs: 50 ns for each small number.
_MAX_COMMAS = 1 << 19


class BoundedRoute(APIRoute):
    """A route that refuses bodies of very many values before they are parsed."""

    def get_route_handler(self) -> Callable[[HTTPRequest], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: HTTPRequest) -> Response:
            if request.method == "POST" and (await request.body()).count(b",") > _MAX_COMMAS:
                raise APIError(
                    413, f"the body has more than {_MAX_COMMAS} commas; send fewer prompts at a time, or texts"
                )
            return await handle(request)

        return bounded


async def require_json(caller: HTTPRequest) -> None:
    """Refuse a body that is not declared as JSON, since a form of a foreign web page can send all other kinds."""
    if caller.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise APIError(415, "expected Content-Type: application/json")


class Service:
    """A served model."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self.engine, self.settings, self.info = engine, settings, engine.engine.info
        self.created = int(time.time())
        self._held_logprobs = 0
        max_characters = settings.prompt_characters(self.info.max_model_len)
        self.prompts = Prompts(engine.engine.tokenizer, settings.chat_template, max_characters, self.info.vocab_size)
        self.metrics = Metrics(engine)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model_name:
            raise APIError(
                404,
                f"this server has only the model {self.settings.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def submit(
        self,
        prompts: list[tuple[int, ...]],
        request: SamplingRequest,
        logprobs: int | None,
        caller: HTTPRequest,
        *,
        prompt_logprobs: int | None = None,
    ) -> tuple[str, Generation]:
        max_answers = self.engine.max_queue + self.info.max_num_seqs
        if len(prompts) * request.n > max_answers:
            raise invalid(
                f"prompt: {len(prompts)} with {request.n} answers each; at most {max_answers} answers in all", "n"
            )
        count = 0
        if prompt_logprobs is not None:
            count = sum(map(len, prompts)) * request.n * (1 + prompt_logprobs)
            if count > MAX_PROMPT_LOGPROBS:
                raise invalid(
                    f"logprobs: {count} numbers for the tokens of the prompts; at most {MAX_PROMPT_LOGPROBS}: "
                    "send fewer prompts at a time, or ask for fewer alternatives",
                    "logprobs",
                )
        params = await self.prompts.run_in_thread(self._params, prompts, request, logprobs, prompt_logprobs)
        name = secrets.token_hex(12)
        salt = f"{caller.scope['state'].get('api_key', '')}/{request.cache_salt or ''}"
        requests = [
            Request(f"{name}-{index}", prompt, params[choice], salt)
            for index, (prompt, choice) in enumerate((prompt, n) for prompt in prompts for n in range(request.n))
        ]
        self._hold(count)
        try:
            generation = await Generation.submit(self.engine, requests)
        except BaseException:
            self._hold(-count)
            raise
        generation.held = partial(self._hold, -count)
        return name, generation

    def _hold(self, count: int) -> None:
        """Count log-probabilities of prompts, which take about 200 bytes each until their answer is written."""
        if count > 0 and self._held_logprobs + count > MAX_PROMPT_LOGPROBS:
            raise QueueFull(
                f"logprobs: other requests hold {self._held_logprobs} numbers for the tokens of their prompts, at most "
                f"{MAX_PROMPT_LOGPROBS} in all; try again later"
            )
        self._held_logprobs += count

    def _params(
        self,
        prompts: list[tuple[int, ...]],
        request: SamplingRequest,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> list[SamplingParams]:
        """Return the sampling parameters of each answer to a prompt, which differ in the seed."""
        stop = request.stop or []
        fields: dict[str, Any] = dict(self.engine.engine.generation_defaults)
        fields |= {name: value for name in MODEL_DEFAULTS if (value := getattr(request, name)) is not None}
        fields["top_k"] = max(fields.get("top_k", 0), 0)
        params = SamplingParams(
            **fields,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            include_stop=request.include_stop_str_in_output,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
            grammar=_grammar(request),
        )
        for prompt in prompts:
            self.engine.engine.check(prompt, params)
            _require_room(prompt, request, self.info.max_model_len)
        if request.seed is None:
            return [params] * request.n
        return [replace(params, seed=(request.seed + index) % _SEEDS) for index in range(request.n)]


def _require_room(prompt: tuple[int, ...], request: SamplingRequest, context: int) -> None:
    """Refuse an answer that was asked for longer than the context, which would end without a word."""
    asked = request.max_tokens if "max_tokens" in request.model_fields_set else None
    room = context - len(prompt)
    if asked is not None and asked > room:
        raise ContextLengthError(
            f"max_tokens: {len(prompt)} tokens of the prompt and {asked} of the answer do not fit the context of "
            f"{context}; ask for at most {room}, or leave max_tokens out"
        )


def _grammar(request: SamplingRequest) -> Grammar | None:
    response_format = request.response_format
    if isinstance(response_format, JsonSchemaFormat):
        return Grammar.json_schema(response_format.json_schema.schema_)
    return Grammar.json_object() if isinstance(response_format, JsonObjectFormat) else None
