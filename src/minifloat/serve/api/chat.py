"""``/v1/chat/completions``: its requests, their translation, its answers and its route."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from minifloat.engine import TokenLogprob
from minifloat.serve.api.answers import CollectedAnswer, FinishReason, Piece
from minifloat.serve.api.choices import AnswerBody, ChoiceWriter, SamplingRequest, Usage, finite
from minifloat.serve.api.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    Alternatives,
    Count,
    Strict,
    Unicode,
    grammar_of,
    implies,
    one_of,
)
from minifloat.serve.api.respond import respond_to
from minifloat.serve.api.sampling import Sampling
from minifloat.serve.dialog.conversation import Conversation, Thinking
from minifloat.serve.server.errors import FieldError
from minifloat.serve.server.openapi import streamed
from minifloat.serve.server.service import BoundedRoute, require_json, service_of


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


Content = Annotated[
    str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)],
    one_of(f'a string, or 1 to {MAX_PARTS} parts {{"type": "text", "text": ...}}; only text is supported'),
    Unicode,
]


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = Field(default=None, max_length=256)

    def for_template(self) -> dict[str, str]:
        """Return the message for a chat template: its parts joined, and OpenAI's newer role `developer` as `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"name": self.name} if self.name else {})


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


# Others are refused: `tokenize`, `chat_template` and the like are arguments of the rendering function.
class TemplateOptions(Strict):
    """The variables of chat templates that a request may set: those that turn thinking on, off or down."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Literal["low", "medium", "high"] | None = None


class ChatCompletionRequest(SamplingRequest):
    """``POST /v1/chat/completions``."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                implies("stream_options", {"type": "object"}, stream=True),
                implies("top_logprobs", {"type": "integer"}, logprobs=True),
            ]
        }
    )

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Alternatives | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["low", "medium", "high"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "it needs logprobs: true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise FieldError("max_completion_tokens", "it differs from max_tokens; give one of them")
        if self.max_tokens is None:
            self.max_tokens = self.max_completion_tokens
        return self

    def conversation(self) -> Conversation:
        variables = {} if self.chat_template_kwargs is None else self.chat_template_kwargs.model_dump(exclude_none=True)
        return Conversation(
            [message.for_template() for message in self.messages],
            variables=variables,
            thinking=Thinking(effort=self.reasoning_effort),
            grammar=grammar_of(self.response_format),
        )

    def sampling(self) -> Sampling:
        return self._sampling(logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class TopLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The chosen token and its most probable alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of ``/v1/chat/completions``."""

    content: list[ChatLogprob]


class AssistantMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One of the messages of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class ChatCompletion(AnswerBody):
    """Answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """The new part of a message; fields that are not set are left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """The new part of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class ChatChunk(AnswerBody):
    """Chunk of a streamed answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Return the log-probabilities of new tokens for ``/v1/chat/completions``."""
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=token.text,
                logprob=finite(token.logprob),
                bytes=list(token.raw),
                top_logprobs=list(map(_top_logprob, token.top)),
            )
            for token in logprobs
        ]
    )


def _top_logprob(token: TokenLogprob) -> TopLogprob:
    return TopLogprob(token=token.text, logprob=finite(token.logprob), bytes=list(token.raw))


class ChatWriter(ChoiceWriter):
    """Writes answers of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    answer_type = (ChatCompletion, "chat.completion")
    chunk_type = (ChatChunk, "chat.completion.chunk")

    def __init__(self, *arguments: Any, choices: int, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._choices = choices

    def opening(self) -> list[BaseModel]:
        """Return a chunk with the role for each choice."""
        ending = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        role = Delta(role="assistant", content="")
        return [self._chunk(ChatChunkChoice(index=index, delta=role, **ending)) for index in range(self._choices)]

    def _news(self, index: int, piece: Piece, ending: dict[str, Any]) -> list[BaseModel]:
        delta = Delta(content=piece.text) if piece.events or piece.finish_reason is None else Delta()
        logprobs = chat_logprobs(piece.delivery.logprobs or ()) if self._logprobs else None
        return [ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, **ending)]

    def _whole(self, index: int, answer: CollectedAnswer, ending: dict[str, Any]) -> BaseModel:
        message = AssistantMessage(role="assistant", content=answer.text, refusal=None)
        logprobs = chat_logprobs(answer.logprobs) if self._logprobs else None
        return ChatChoice(index=index, message=message, logprobs=logprobs, **ending)


router = APIRouter(route_class=BoundedRoute, tags=["OpenAI"], dependencies=[Depends(require_json)])


@router.post("/v1/chat/completions", response_model=None, responses=streamed(ChatCompletion, ChatChunk))
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Continue a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    writer = ChatWriter(
        service.settings.model_name, choices=body.n, logprobs=body.logprobs, with_usage=body.wants_usage
    )
    return await respond_to(
        body.conversation(), body.sampling(), writer, service=service, caller=request, stream=body.stream
    )
