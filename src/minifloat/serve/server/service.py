"""The served model, which every route uses: engine, tokenizer, settings, and the submission of requests.

Tokenizing a megabyte takes a second, so it runs in a thread beside the event loop, after a cheap check of the length.
There is one such thread for long texts and one for all else: long prompts do not take every core from the engine, and
short ones do not wait for them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request as HTTPRequest
from fastapi.routing import APIRoute
from starlette.responses import Response

from minifloat.engine import Request, SamplingParams
from minifloat.errors import ContextLengthError, QueueFull, UsageError
from minifloat.serve.api.sampling import Sampling
from minifloat.serve.dialog.conversation import Conversation
from minifloat.serve.dialog.prompt import Dialog, Dialogs
from minifloat.serve.server.errors import APIError, invalid
from minifloat.serve.server.generation import Generation
from minifloat.serve.server.metrics import Metrics
from minifloat.serve.server.settings import ServerSettings

if TYPE_CHECKING:
    from minifloat.engine import AsyncEngine
    from minifloat.model.runtime.tokenizer import TextTokenizer

_Result = TypeVar("_Result")

#: Log-probabilities of prompts in all answers to a request, one per token and alternative, and token ids of prompts.
MAX_PROMPT_LOGPROBS = 1 << 19
#: Requests with very many texts that are at work at a time.
_LARGE_REQUESTS = 8
#: What a model does -> what it tells those who ask for something else.
_TASKS = {
    "generate": "generates text: nothing in its folder says how it makes vectors or scores (modules.json, a head)",
    "embed": "makes vectors of texts and generates none; ask /v1/embeddings, /v1/rerank or /v1/score",
    "score": "scores pairs of texts and generates none; ask /v1/rerank or /v1/score",
}
#: Characters, or tokens, of a text that is processed in less than about 10 ms.
_SHORT = 10_000


class Prompts:
    def __init__(self, tokenizer: TextTokenizer, dialogs: Dialogs, max_characters: int, vocab_size: int) -> None:
        self.dialogs = dialogs
        self._tokenizer, self._max_characters, self._vocab_size = tokenizer, max_characters, vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minifloat-tokenizer")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="minifloat-long-texts")

    def close(self) -> None:
        for thread in (self._thread, self._long_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    async def run_in_thread(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        return await self._run(self._thread, work, *arguments)

    async def _run(self, thread: ThreadPoolExecutor, work: Callable[..., _Result], *arguments: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(thread, work, *arguments)

    def _thread_for(self, length: int) -> ThreadPoolExecutor:
        return self._thread if length <= _SHORT else self._long_thread

    async def encode(
        self, prompt: str | list[int], *, add_special_tokens: bool = True, may_be_empty: bool = False
    ) -> tuple[int, ...]:
        """Return the tokens of a text. Token ids are returned as they are."""
        if not isinstance(prompt, str):
            if max(prompt) >= self._vocab_size:
                raise UsageError(f"prompt: token id {max(prompt)}; the model has {self._vocab_size} tokens")
            return tuple(prompt)
        if len(prompt) > self._max_characters:
            raise UsageError(
                f"prompt: it has {len(prompt)} characters; at most {self._max_characters} are tokenized "
                "(see --max-model-len and --max-prompt-characters)"
            )
        tokens = await self._run(self._thread_for(len(prompt)), self._encode, prompt, add_special_tokens)
        if not tokens and not may_be_empty:
            if self._tokenizer.bos_token_id is None:
                raise UsageError("prompt: it is empty, and the tokenizer has no token that begins a text (BOS)")
            tokens = [self._tokenizer.bos_token_id]
        return tuple(tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # verbose would log a warning about long texts, which are refused elsewhere
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)

    def encode_word(self, text: str) -> list[int]:
        """Return the tokens of a short text, without special tokens."""
        return self._encode(text, False)

    async def encode_chat(self, conversation: Conversation) -> Dialog:
        """Return a conversation with its prompt."""
        messages = conversation.messages
        size = sum(len(message.get(name) or "") for message in messages for name in ("content", "reasoning_content"))
        others = [message.get("tool_calls") for message in messages]
        others += [conversation.documents, dict(conversation.variables)]
        others += [tool.for_template() for tool in conversation.tools]
        size += sum(len(json.dumps(other, ensure_ascii=False)) for other in others if other)
        if size > self._max_characters:
            raise UsageError(
                f"messages: with tools and documents they have {size} characters; at most {self._max_characters} "
                "are tokenized"
            )
        dialog = await self._run(self._thread_for(size), self.dialogs.read, conversation, self._max_characters)
        if not dialog.prompt:
            raise UsageError("messages: the chat template turns them into an empty prompt")
        return dialog

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        if tokens and max(tokens) >= self._vocab_size:
            raise UsageError(f"tokens: token id {max(tokens)}; the model has {self._vocab_size} tokens")
        return str(await self._run(self._thread_for(len(tokens)), self._tokenizer.decode, list(tokens)))

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        name = self._tokenizer.convert_ids_to_tokens
        return await self._run(self._thread_for(len(tokens)), lambda: [str(name(token)) for token in tokens])


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
    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self.engine, self.settings, self.info = engine, settings, engine.engine.info
        self.created = int(time.time())
        self._held_logprobs = 0
        #: Requests with very many texts; those beyond it wait, with no vectors in memory.
        self.large_requests = asyncio.Semaphore(_LARGE_REQUESTS)
        max_characters = settings.prompt_characters(self.info.max_model_len)
        tokenizer = engine.engine.tokenizer
        dialogs = Dialogs(
            tokenizer,
            settings.chat_template,
            settings.tool_format,
            separate_thinking=settings.reasoning_format != "none",
        )
        self.prompts = Prompts(tokenizer, dialogs, max_characters, self.info.vocab_size)
        self.metrics = Metrics(engine)

    def check_model(self, name: str | None, *tasks: str) -> None:
        """Refuse another model than the served one, and one that does none of the tasks that a route is for."""
        if name is not None and name != self.settings.model_name:
            raise APIError(
                404,
                f"this server has only the model {self.settings.model_name!r}",
                param="model",
                code="model_not_found",
            )
        if tasks and self.info.task not in tasks:
            raise APIError(
                400,
                f"model: {self.settings.model_name!r} {_TASKS[self.info.task]}",
                param="model",
                code="unsupported_task",
            )

    async def submit(
        self, name: str, prompts: Sequence[tuple[int, ...]], sampling: Sampling, caller: HTTPRequest
    ) -> Generation:
        """Submit the answers to prompts, of which the engine admits all or none."""
        max_answers = self.engine.max_queue + self.info.max_num_seqs
        if len(prompts) * sampling.n > max_answers:
            raise invalid(
                f"prompt: {len(prompts)} with {sampling.n} answers each; at most {max_answers} answers in all", "n"
            )
        count, returned = 0, sum(map(len, prompts)) * sampling.n
        if sampling.returns_ids and returned > MAX_PROMPT_LOGPROBS:
            raise invalid(
                f"return_token_ids: {returned} tokens of prompts; at most {MAX_PROMPT_LOGPROBS}: send fewer prompts at "
                "a time, or ask for fewer answers",
                "return_token_ids",
            )
        if sampling.prompt_logprobs is not None:
            count = returned * (1 + sampling.prompt_logprobs)
            if count > MAX_PROMPT_LOGPROBS:
                raise invalid(
                    f"logprobs: {count} numbers for the tokens of the prompts; at most {MAX_PROMPT_LOGPROBS}: "
                    "send fewer prompts at a time, or ask for fewer alternatives",
                    "logprobs",
                )
        params = await self.prompts.run_in_thread(self._params, prompts, sampling)
        salt = f"{caller.scope['state'].get('api_key', '')}/{sampling.cache_salt}"
        requests = [
            Request(f"{name}-{index}", prompt, params[choice], salt, sampling.priority)
            for index, (prompt, choice) in enumerate((prompt, n) for prompt in prompts for n in range(sampling.n))
        ]
        self._hold(count)
        try:
            generation = await Generation.submit(self.engine, requests)
        except BaseException:
            self._hold(-count)
            raise
        generation.held = partial(self._hold, -count)
        return generation

    def _hold(self, count: int) -> None:
        """Count log-probabilities of prompts, which take about 200 bytes each until their answer is written."""
        if count > 0 and self._held_logprobs + count > MAX_PROMPT_LOGPROBS:
            raise QueueFull(
                f"logprobs: other requests hold {self._held_logprobs} numbers for the tokens of their prompts, at most "
                f"{MAX_PROMPT_LOGPROBS} in all; try again later"
            )
        self._held_logprobs += count

    def _params(self, prompts: Sequence[tuple[int, ...]], sampling: Sampling) -> list[SamplingParams]:
        """Return the parameters of each answer to a prompt, which every prompt leaves room for."""
        bounded = sampling.bounded(len(prompts))
        params = bounded.params(self.engine.engine.generation_defaults, self.prompts.encode_word)
        for prompt in prompts:
            self.engine.engine.check(prompt, params[0])
            _require_room(prompt, sampling, self.info.max_model_len)
        return params


def _require_room(prompt: tuple[int, ...], sampling: Sampling, context: int) -> None:
    """Refuse an answer that was asked for longer than the context, which would end without a word."""
    asked, room = sampling.max_tokens, context - len(prompt)
    if sampling.must_fit and asked is not None and asked > room:
        raise ContextLengthError(
            f"max_tokens: {len(prompt)} tokens of the prompt and {asked} of the answer do not fit the context of "
            f"{context}; ask for at most {room}, or leave max_tokens out"
        )


def service_of(request: HTTPRequest) -> Service:
    service: Service = request.app.state.service
    return service
