"""The bodies of answers, named and shaped as in OpenAI's API, and their writers: whole answers, or chunk by chunk.

Fields that vLLM adds have vLLM's names.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import BaseModel

from minifloat._version import __version__
from minifloat.engine import Delivery, TokenLogprob
from minifloat.engine import TokenUsage as EngineUsage

#: Log-probability of an impossible token, since JSON has no infinity.
_IMPOSSIBLE = -9999.0

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    """Number of tokens of the prompt that came from the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Numbers of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, choices: Sequence[EngineUsage], per_prompt: int) -> Usage:
        prompts = choices[::per_prompt]
        completion_tokens = sum(choice.completion_tokens for choice in choices)
        prompt_tokens = sum(prompt.prompt_tokens for prompt in prompts)
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(prompt.cached_tokens for prompt in prompts)),
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


class _Answer(BaseModel):
    """The fields that all answers begin with, in this order."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class CompletionChoice(BaseModel):
    """One of the texts of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class Completion(_Answer):
    """Answer of ``/v1/completions``, and chunk of a streamed answer."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


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


class ChatCompletion(_Answer):
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


class ChatChunk(_Answer):
    """Chunk of a streamed answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "minifloat"
    max_model_len: int


class ModelList(BaseModel):
    """Answer of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """Answer of ``/health`` and ``/ready``."""

    status: Literal["ok"] = "ok"


class Version(BaseModel):
    """Answer of ``/version``."""

    version: str


class Tokens(BaseModel):
    """Answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """Answer of ``/detokenize``."""

    prompt: str


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Return the log-probabilities of new tokens for ``/v1/chat/completions``."""
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=token.text,
                logprob=_finite(token.logprob),
                bytes=list(token.raw),
                top_logprobs=list(map(_top_logprob, token.top)),
            )
            for token in logprobs
        ]
    )


def completion_logprobs(logprobs: Iterable[TokenLogprob], offset: int, *, as_ids: bool = False) -> CompletionLogprobs:
    """Return the log-probabilities of new tokens for ``/v1/completions``."""

    def name(token: TokenLogprob) -> str:
        return token_id(token.token) if as_ids else token.text

    lists = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token in logprobs:
        lists.text_offset.append(offset)
        lists.tokens.append(name(token))
        lists.token_logprobs.append(_finite(token.logprob))
        # Tokens may have the same text (parts of a character): the most probable of them counts, so that a token is the
        # most probable one exactly if no entry exceeds its own.
        logprob_by_name: dict[str, float] = {}
        for candidate in (*token.top, token):  # the most probable first
            logprob_by_name.setdefault(name(candidate), _finite(candidate.logprob))
        lists.top_logprobs.append(logprob_by_name)
        offset += len(token.text)
    return lists


def token_id(token: int) -> str:
    return f"token_id:{token}"


def _top_logprob(token: TokenLogprob) -> TopLogprob:
    return TopLogprob(token=token.text, logprob=_finite(token.logprob), bytes=list(token.raw))


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)


FINGERPRINT = f"minifloat-{__version__}"


class CollectedChoice:
    """All deliveries of one choice, joined."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.usage = EngineUsage(0, 0, 0)

    def add(self, delivery: Delivery) -> None:
        self._pieces.append(delivery.text)
        self.logprobs += delivery.logprobs or ()
        self.prompt_logprobs = delivery.prompt_logprobs or self.prompt_logprobs
        if delivery.finish_reason is not None:
            self.finish_reason, self.stop_reason = reason(delivery), delivery.stop_reason
            self.usage = delivery.usage or self.usage

    @property
    def text(self) -> str:
        return "".join(self._pieces)


def reason(delivery: Delivery) -> FinishReason | None:
    """Return the reason why a choice ended. `Generation` raises for choices that failed or were cancelled."""
    return cast(FinishReason | None, delivery.finish_reason)


class Writer(ABC):
    """Writes one kind of answer; `answer_type` and `chunk_type` are its bodies with their `object`."""

    answer_type: tuple[type[BaseModel], str]
    chunk_type: tuple[type[BaseModel], str]

    def __init__(self, name: str, model: str, *, logprobs: bool, with_usage: bool) -> None:
        self._logprobs, self._with_usage = logprobs, with_usage
        self._fields = {
            "id": name,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    @abstractmethod
    def opening(self) -> list[BaseModel]:
        """Return the chunks before the first token."""

    @abstractmethod
    def _new_text(self, index: int, delivery: Delivery, ending: dict[str, Any]) -> BaseModel:
        """Return the choice of a chunk."""

    @abstractmethod
    def _whole(self, index: int, choice: CollectedChoice, ending: dict[str, Any]) -> BaseModel:
        """Return the choice of a whole answer."""

    def chunk(self, index: int, delivery: Delivery) -> BaseModel:
        ending = {"finish_reason": reason(delivery), "stop_reason": delivery.stop_reason}
        return self._chunk(self._new_text(index, delivery, ending))

    def last(self, usage: Usage) -> BaseModel:
        """Return the chunk with the usage, which has no text."""
        body, kind = self.chunk_type
        return body(object=kind, choices=[], **self._fields, usage=usage)

    def answer(self, choices: Sequence[CollectedChoice], usage: Usage) -> BaseModel:
        body, kind = self.answer_type
        bodies = [
            self._whole(index, choice, {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason})
            for index, choice in enumerate(choices)
        ]
        return body(object=kind, choices=bodies, usage=usage, **self._fields)

    def _chunk(self, choice: BaseModel) -> BaseModel:
        body, kind = self.chunk_type
        return body(object=kind, choices=[choice], **self._fields, **({"usage": None} if self._with_usage else {}))


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt that the text of a choice begins with (``echo``). Empty if no echo is requested."""

    text: str = ""
    first_token: str = ""
    first_id: int = 0


class TextWriter(Writer):
    """Writes answers of ``/v1/completions``."""

    answer_type = chunk_type = (Completion, "text_completion")

    def __init__(self, *arguments: Any, prompts: Sequence[EchoedPrompt], as_ids: bool, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._prompts, self._as_ids = prompts, as_ids
        self._offsets = [len(prompt.text) for prompt in prompts]

    def opening(self) -> list[BaseModel]:
        """Return chunks with the echoed prompts; with log-probabilities they come with the first delivery instead."""
        ending = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        return [
            self._chunk(CompletionChoice(index=index, text=prompt.text, **ending))
            for index, prompt in enumerate(self._prompts)
            if prompt.text and not self._logprobs
        ]

    def _new_text(self, index: int, delivery: Delivery, ending: dict[str, Any]) -> BaseModel:
        text = (self._prompts[index].text if delivery.prompt_logprobs else "") + delivery.text
        logprobs = self._logprobs_of(index, delivery.prompt_logprobs, delivery.logprobs or ())
        return CompletionChoice(index=index, text=text, logprobs=logprobs, **ending)

    def _whole(self, index: int, choice: CollectedChoice, ending: dict[str, Any]) -> BaseModel:
        logprobs = self._logprobs_of(index, choice.prompt_logprobs, choice.logprobs)
        return CompletionChoice(index=index, text=self._prompts[index].text + choice.text, logprobs=logprobs, **ending)

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


class ChatWriter(Writer):
    """Writes answers of ``/v1/chat/completions``."""

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

    def _new_text(self, index: int, delivery: Delivery, ending: dict[str, Any]) -> BaseModel:
        delta = Delta(content=delivery.text) if delivery.text or delivery.finish_reason is None else Delta()
        logprobs = chat_logprobs(delivery.logprobs or ()) if self._logprobs else None
        return ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, **ending)

    def _whole(self, index: int, choice: CollectedChoice, ending: dict[str, Any]) -> BaseModel:
        message = AssistantMessage(role="assistant", content=choice.text, refusal=None)
        logprobs = chat_logprobs(choice.logprobs) if self._logprobs else None
        return ChatChoice(index=index, message=message, logprobs=logprobs, **ending)
