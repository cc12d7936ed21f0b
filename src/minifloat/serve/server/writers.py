"""From what the engine delivers to the bodies of answers: at once, or chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from pydantic import BaseModel

from minifloat._version import __version__
from minifloat.serve.engine import Delivery, TokenLogprob
from minifloat.serve.engine import Usage as EngineUsage
from minifloat.serve.server.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FinishReason,
    Usage,
    chat_logprobs,
    completion_logprobs,
)

FINGERPRINT = f"minifloat-{__version__}"


class Collected:
    """All deliveries of one choice."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.usage = EngineUsage(0, 0, 0)

    def add(self, delivery: Delivery) -> None:
        """Take the next one."""
        self._pieces.append(delivery.text)
        self.logprobs += delivery.logprobs or ()
        self.prompt_logprobs = delivery.prompt_logprobs or self.prompt_logprobs
        if delivery.finish_reason is not None:
            self.finish_reason, self.stop_reason = reason(delivery), delivery.stop_reason
            self.usage = delivery.usage or self.usage

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._pieces)


def reason(delivery: Delivery) -> FinishReason | None:
    """Why a choice ended; those that failed do not come here."""
    return cast(FinishReason | None, delivery.finish_reason)


class Writer(Protocol):
    """Writes one kind of answer."""

    def opening(self) -> list[BaseModel]:
        """Chunks before the first token."""

    def chunk(self, index: int, delivery: Delivery) -> BaseModel:
        """The chunk of a delivery to the choice `index`."""

    def last(self, usage: Usage) -> BaseModel:
        """The chunk with the usage."""

    def whole(self, choices: Sequence[Collected], usage: Usage) -> BaseModel:
        """The answer at once."""


class _Head:
    """What every body begins with.

    Args:
        name: Id of the answer.
        model: Name of the model.
        with_usage: Whether chunks have the field `usage`, which is null in all but the last.
    """

    def __init__(self, name: str, model: str, *, with_usage: bool) -> None:
        self.fields: dict[str, Any] = {
            "id": name,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self.chunk_fields = self.fields | ({"usage": None} if with_usage else {})


@dataclass(frozen=True)
class Head:
    """What a text begins with where its prompt is asked for: the prompt, and the text of its first token."""

    text: str = ""
    first: str = ""


class TextWriter:
    """``/v1/completions``.

    Args:
        name: Id of the answer.
        model: Name of the model.
        heads: What the text of each choice begins with.
        logprobs: Whether log-probabilities are asked for.
        with_usage: Whether chunks have the field `usage`.
    """

    def __init__(self, name: str, model: str, heads: Sequence[Head], *, logprobs: bool, with_usage: bool) -> None:
        self._head = _Head(name, model, with_usage=with_usage)
        self._heads, self._logprobs = heads, logprobs
        self._offsets = [len(head.text) for head in heads]

    def opening(self) -> list[BaseModel]:
        """The prompts, where they are asked for; those with log-probabilities come with the first delivery."""
        if self._logprobs:
            return []
        return [
            self._chunk(
                CompletionChoice(index=index, text=head.text, logprobs=None, finish_reason=None, stop_reason=None)
            )
            for index, head in enumerate(self._heads)
            if head.text
        ]

    def chunk(self, index: int, delivery: Delivery) -> BaseModel:
        """New text."""
        return self._chunk(
            CompletionChoice(
                index=index,
                text=(self._heads[index].text if delivery.prompt_logprobs else "") + delivery.text,
                logprobs=self._of(index, delivery.prompt_logprobs, delivery.logprobs or ()),
                finish_reason=reason(delivery),
                stop_reason=delivery.stop_reason,
            )
        )

    def last(self, usage: Usage) -> BaseModel:
        """No text."""
        return Completion(object="text_completion", choices=[], **self._head.fields, usage=usage)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> BaseModel:
        """All texts."""
        made = [
            CompletionChoice(
                index=index,
                text=self._heads[index].text + one.text,
                logprobs=self._of(index, one.prompt_logprobs, one.logprobs),
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
            )
            for index, one in enumerate(choices)
        ]
        return Completion(object="text_completion", choices=made, usage=usage, **self._head.fields)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        return Completion(object="text_completion", choices=[choice], **self._head.chunk_fields)

    def _of(
        self, index: int, of_prompt: Sequence[TokenLogprob | None] | None, logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs | None:
        if not self._logprobs:
            return None
        offset = self._offsets[index]
        self._offsets[index] += sum(len(one.text) for one in logprobs)
        made = completion_logprobs(logprobs, offset)
        return made if of_prompt is None else prompt_logprobs(self._heads[index], of_prompt) + made


def prompt_logprobs(head: Head, logprobs: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
    """Of the tokens of a prompt; a first one that its text does not begin with (the tokenizer's own) takes no room."""
    room = len(head.first) if head.text.startswith(head.first) else 0
    first = CompletionLogprobs(text_offset=[0], token_logprobs=[None], tokens=[head.first], top_logprobs=[None])
    return first + completion_logprobs([one for one in logprobs if one is not None], room)


class ChatWriter:
    """``/v1/chat/completions``.

    Args:
        name: Id of the answer.
        model: Name of the model.
        choices: How many answers.
        logprobs: Whether log-probabilities are asked for.
        with_usage: Whether chunks have the field `usage`.
    """

    def __init__(self, name: str, model: str, choices: int, *, logprobs: bool, with_usage: bool) -> None:
        self._head = _Head(name, model, with_usage=with_usage)
        self._choices, self._logprobs = choices, logprobs

    def opening(self) -> list[BaseModel]:
        """Who speaks."""
        return [self._chunk(index, Delta(role="assistant", content="")) for index in range(self._choices)]

    def chunk(self, index: int, delivery: Delivery) -> BaseModel:
        """New text."""
        logprobs = self._of(delivery.logprobs or ())
        delta = Delta(content=delivery.text) if delivery.text or delivery.finish_reason is None else Delta()
        return self._chunk(index, delta, logprobs, reason(delivery), delivery.stop_reason)

    def last(self, usage: Usage) -> BaseModel:
        """No text."""
        return ChatChunk(object="chat.completion.chunk", choices=[], **self._head.fields, usage=usage)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> BaseModel:
        """All messages."""
        made = [
            ChatChoice(
                index=index,
                message=AssistantMessage(role="assistant", content=one.text, refusal=None),
                logprobs=self._of(one.logprobs),
                finish_reason=one.finish_reason or "stop",
                stop_reason=one.stop_reason,
            )
            for index, one in enumerate(choices)
        ]
        return ChatCompletion(object="chat.completion", choices=made, usage=usage, **self._head.fields)

    def _chunk(
        self,
        index: int,
        delta: Delta,
        logprobs: ChatLogprobs | None = None,
        finish_reason: Literal["stop", "length"] | None = None,
        stop_reason: str | int | None = None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason, stop_reason=stop_reason
        )
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **self._head.chunk_fields)

    def _of(self, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(logprobs) if self._logprobs else None
