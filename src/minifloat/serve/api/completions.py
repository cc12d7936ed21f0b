"""``/v1/completions``: its requests, their translation, its answers and its route."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from minifloat.engine import TokenLogprob
from minifloat.serve.api.answers import CollectedAnswer, FinishReason, Piece
from minifloat.serve.api.choices import AnswerBody, ChoiceWriter, SamplingRequest, Usage, finite
from minifloat.serve.api.fields import Alternatives, Natural, Prompt, implies
from minifloat.serve.api.respond import respond
from minifloat.serve.api.sampling import Sampling
from minifloat.serve.server.errors import FieldError
from minifloat.serve.server.openapi import streamed
from minifloat.serve.server.service import BoundedRoute, require_json, service_of

#: `max_tokens` of a completion that does not state it, as in OpenAI's API. A chat goes to the end of the context.
DEFAULT_COMPLETION_TOKENS = 16


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                implies("stream_options", {"type": "object"}, stream=True),
                implies("max_tokens", {"const": 0}, echo=True),
            ]
        }
    )

    prompt: Prompt
    max_tokens: Natural | None = Field(
        default=DEFAULT_COMPLETION_TOKENS,
        description="0: the prompt alone, with echo; null: to the end of the context.",
    )
    echo: bool = Field(default=False, description="Begin the text, and its log-probabilities, with the prompt.")
    logprobs: Alternatives | None = None
    return_tokens_as_token_ids: bool = Field(
        default=False, description="Log-probabilities name tokens as token_id:N, so that equal texts are no problem."
    )
    add_special_tokens: bool = Field(default=True, description="Begin the prompt as the tokenizer begins a text.")

    @model_validator(mode="after")
    def _has_output(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "expected at least 1; 0 is for the prompt alone, with echo: true")
        return self

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return list(self.prompt)

    def sampling(self) -> Sampling:
        return self._sampling(
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
            must_fit="max_tokens" in self.model_fields_set,
            grammar=self.grammar(),
        )


class CompletionLogprobs(BaseModel):
    """Log-probabilities of ``/v1/completions``: parallel lists; null for the first token of a prompt."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def __add__(self, later: CompletionLogprobs) -> CompletionLogprobs:
        """Return the log-probabilities of this text followed by those of a later one."""
        return CompletionLogprobs.model_construct(  # validating them again takes long
            text_offset=self.text_offset + later.text_offset,
            token_logprobs=self.token_logprobs + later.token_logprobs,
            tokens=self.tokens + later.tokens,
            top_logprobs=self.top_logprobs + later.top_logprobs,
        )


class CompletionChoice(BaseModel):
    """One of the texts of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(AnswerBody):
    """Answer of ``/v1/completions``, and chunk of a streamed answer."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


def completion_logprobs(logprobs: Iterable[TokenLogprob], offset: int, *, as_ids: bool = False) -> CompletionLogprobs:
    """Return the log-probabilities of new tokens for ``/v1/completions``."""

    def name(token: TokenLogprob) -> str:
        return token_id(token.token) if as_ids else token.text

    lists = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token in logprobs:
        lists.text_offset.append(offset)
        lists.tokens.append(name(token))
        lists.token_logprobs.append(finite(token.logprob))
        # Tokens may have the same text (parts of a character): the most probable of them counts, so that a token is the
        # most probable one exactly if no entry exceeds its own.
        logprob_by_name: dict[str, float] = {}
        for candidate in (*token.top, token):  # the most probable first
            logprob_by_name.setdefault(name(candidate), finite(candidate.logprob))
        lists.top_logprobs.append(logprob_by_name)
        offset += len(token.text)
    return lists


def token_id(token: int) -> str:
    return f"token_id:{token}"


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt that the text of a choice begins with (``echo``). Empty if no echo is requested."""

    text: str = ""
    first_token: str = ""
    first_id: int = 0


class TextWriter(ChoiceWriter):
    """Writes answers of ``/v1/completions``."""

    prefix = "cmpl"
    answer_type = chunk_type = (Completion, "text_completion")

    def __init__(self, *arguments: Any, prompts: Sequence[EchoedPrompt], as_ids: bool, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._prompts, self._as_ids = prompts, as_ids
        self._offsets = [len(prompt.text) for prompt in prompts]

    def opening(self) -> list[BaseModel]:
        """Return chunks with the prompts; with log-probabilities their texts come with the first delivery instead."""
        ending = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        texts = ["" if self._logprobs else prompt.text for prompt in self._prompts]
        return [
            self._chunk(CompletionChoice(index=index, text=text, **ending, **self._ids(()), **self._prompt_ids(index)))
            for index, text in enumerate(texts)
            if text or self._with_ids
        ]

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        """Return the field of a choice with the tokens of its prompt, if the request wants them."""
        prompt = index * len(self.prompts) // len(self._prompts)
        return {"prompt_token_ids": list(self.prompts[prompt])} if self._with_ids else {}

    def _news(self, index: int, piece: Piece, ending: dict[str, Any]) -> list[BaseModel]:
        delivery = piece.delivery
        text = (self._prompts[index].text if delivery.prompt_logprobs else "") + piece.text
        logprobs = self._logprobs_of(index, delivery.prompt_logprobs, delivery.logprobs or ())
        return [CompletionChoice(index=index, text=text, logprobs=logprobs, **ending)]

    def _whole(self, index: int, answer: CollectedAnswer, ending: dict[str, Any]) -> BaseModel:
        logprobs = self._logprobs_of(index, answer.prompt_logprobs, answer.logprobs)
        text = self._prompts[index].text + answer.text
        return CompletionChoice(index=index, text=text, logprobs=logprobs, **ending, **self._prompt_ids(index))

    def _logprobs_of(
        self, index: int, of_prompt: Sequence[TokenLogprob | None] | None, of_new: Sequence[TokenLogprob]
    ) -> CompletionLogprobs | None:
        """Return the log-probabilities of new tokens of a choice, after those of its prompt if there are any."""
        if not self._logprobs:
            return None
        offset = self._offsets[index]
        self._offsets[index] += sum(len(token.text) for token in of_new)
        logprobs = completion_logprobs(of_new, offset, as_ids=self._as_ids)
        if of_prompt is None:
            return logprobs
        return prompt_logprobs(self._prompts[index], of_prompt, as_ids=self._as_ids) + logprobs


def prompt_logprobs(
    prompt: EchoedPrompt, logprobs: Sequence[TokenLogprob | None], *, as_ids: bool = False
) -> CompletionLogprobs:
    """Return the log-probabilities of the tokens of a prompt."""
    # a first token that the tokenizer added, which the text does not begin with, takes no characters
    first_length = len(prompt.first_token) if prompt.text.startswith(prompt.first_token) else 0
    name = token_id(prompt.first_id) if as_ids else prompt.first_token
    first = CompletionLogprobs(text_offset=[0], token_logprobs=[None], tokens=[name], top_logprobs=[None])
    known = [token for token in logprobs if token is not None]
    return first + completion_logprobs(known, first_length, as_ids=as_ids)


router = APIRouter(route_class=BoundedRoute, tags=["OpenAI"], dependencies=[Depends(require_json)])


@router.post("/v1/completions", response_model=None, responses=streamed(Completion, Completion))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several texts."""
    service = service_of(request)
    service.check_model(body.model, "generate")
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
    writer = TextWriter(
        service.settings.model_name,
        prompts=[prompt for prompt in echoed for _ in range(body.n)],
        logprobs=body.logprobs is not None,
        with_usage=body.wants_usage,
        with_ids=body.return_token_ids,
        as_ids=body.return_tokens_as_token_ids,
    )
    sampling = await service.prompts.run_in_thread(body.sampling)
    return await respond(prompts, sampling, writer, service=service, caller=request, stream=body.stream)
