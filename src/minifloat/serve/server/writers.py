"""Turn the engine's deliveries into the bodies of answers: a whole answer, or chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from pydantic import BaseModel

from minifloat._version import __version__
from minifloat.engine import Delivery, TokenLogprob
from minifloat.engine import TokenUsage as EngineUsage
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
    token_id,
)

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
        """Add the next delivery."""
        self._pieces.append(delivery.text)
        self.logprobs += delivery.logprobs or ()
        self.prompt_logprobs = delivery.prompt_logprobs or self.prompt_logprobs
        if delivery.finish_reason is not None:
            self.finish_reason, self.stop_reason = reason(delivery), delivery.stop_reason
            self.usage = delivery.usage or self.usage

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)


def reason(delivery: Delivery) -> FinishReason | None:
    """Return the reason why a choice ended. `Generation` raises for choices that failed or were cancelled."""
    return cast(FinishReason | None, delivery.finish_reason)


class Writer(Protocol):
    """Writes one kind of answer."""

    def opening(self) -> list[BaseModel]:
        """Return the chunks before the first token."""

    def chunk(self, index: int, delivery: Delivery) -> BaseModel:
        """Return the chunk of a delivery to the choice `index`."""

    def last(self, usage: Usage) -> BaseModel:
        """Return the chunk with the usage, which has no text."""

    def answer(self, choices: Sequence[CollectedChoice], usage: Usage) -> BaseModel:
        """Return the whole answer."""


class _CommonFields:
    """The fields that every body begins with."""

    def __init__(self, name: str, model: str, *, with_usage: bool) -> None:
        self.of_answer: dict[str, Any] = {
            "id": name,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self.of_chunk = self.of_answer | ({"usage": None} if with_usage else {})


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt that the text of a choice begins with (``echo``). Empty if no echo is requested."""

    text: str = ""
    first_token: str = ""
    first_id: int = 0


class TextWriter:
    """Writes answers of ``/v1/completions``."""

    def __init__(
        self,
        name: str,
        model: str,
        prompts: Sequence[EchoedPrompt],
        *,
        logprobs: bool,
        with_usage: bool,
        as_ids: bool = False,
    ) -> None:
        self._fields = _CommonFields(name, model, with_usage=with_usage)
        self._prompts, self._logprobs, self._as_ids = prompts, logprobs, as_ids
        self._offsets = [len(prompt.text) for prompt in prompts]

    def opening(self) -> list[BaseModel]:
        """Return chunks with the echoed prompts; with log-probabilities they come with the first delivery instead."""
        if self._logprobs:
            return []
        return [
            self._chunk(
                CompletionChoice(index=index, text=prompt.text, logprobs=None, finish_reason=None, stop_reason=None)
            )
            for index, prompt in enumerate(self._prompts)
            if prompt.text
        ]

    def chunk(self, index: int, delivery: Delivery) -> BaseModel:
        """Return a chunk of new text."""
        return self._chunk(
            CompletionChoice(
                index=index,
                text=(self._prompts[index].text if delivery.prompt_logprobs else "") + delivery.text,
                logprobs=self._logprobs_of(index, delivery.prompt_logprobs, delivery.logprobs or ()),
                finish_reason=reason(delivery),
                stop_reason=delivery.stop_reason,
            )
        )

    def last(self, usage: Usage) -> BaseModel:
        """Return the chunk with the usage, which has no text."""
        return Completion(object="text_completion", choices=[], **self._fields.of_answer, usage=usage)

    def answer(self, choices: Sequence[CollectedChoice], usage: Usage) -> BaseModel:
        """Return the answer with all texts."""
        bodies = [
            CompletionChoice(
                index=index,
                text=self._prompts[index].text + choice.text,
                logprobs=self._logprobs_of(index, choice.prompt_logprobs, choice.logprobs),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return Completion(object="text_completion", choices=bodies, usage=usage, **self._fields.of_answer)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        return Completion(object="text_completion", choices=[choice], **self._fields.of_chunk)

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
    """Return the log-probabilities of the tokens of a prompt.

    A first token that the tokenizer added, which the prompt's text does not begin with, takes no characters.
    """
    first_length = len(prompt.first_token) if prompt.text.startswith(prompt.first_token) else 0
    name = token_id(prompt.first_id) if as_ids else prompt.first_token
    first = CompletionLogprobs(text_offset=[0], token_logprobs=[None], tokens=[name], top_logprobs=[None])
    known = [token for token in logprobs if token is not None]
    return first + completion_logprobs(known, first_length, as_ids=as_ids)


class ChatWriter:
    """Writes answers of ``/v1/chat/completions``."""

    def __init__(self, name: str, model: str, choices: int, *, logprobs: bool, with_usage: bool) -> None:
        self._fields = _CommonFields(name, model, with_usage=with_usage)
        self._choices, self._logprobs = choices, logprobs

    def opening(self) -> list[BaseModel]:
        """Return a chunk with the role for each choice."""
        return [self._chunk(index, Delta(role="assistant", content="")) for index in range(self._choices)]

    def chunk(self, index: int, delivery: Delivery) -> BaseModel:
        """Return a chunk of new text."""
        logprobs = self._logprobs_of(delivery.logprobs or ())
        delta = Delta(content=delivery.text) if delivery.text or delivery.finish_reason is None else Delta()
        return self._chunk(index, delta, logprobs, reason(delivery), delivery.stop_reason)

    def last(self, usage: Usage) -> BaseModel:
        """Return the chunk with the usage, which has no text."""
        return ChatChunk(object="chat.completion.chunk", choices=[], **self._fields.of_answer, usage=usage)

    def answer(self, choices: Sequence[CollectedChoice], usage: Usage) -> BaseModel:
        """Return the answer with all messages."""
        bodies = [
            ChatChoice(
                index=index,
                message=AssistantMessage(role="assistant", content=choice.text, refusal=None),
                logprobs=self._logprobs_of(choice.logprobs),
                finish_reason=choice.finish_reason or "stop",
                stop_reason=choice.stop_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return ChatCompletion(object="chat.completion", choices=bodies, usage=usage, **self._fields.of_answer)

    def _chunk(
        self,
        index: int,
        delta: Delta,
        logprobs: ChatLogprobs | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason, stop_reason=stop_reason
        )
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **self._fields.of_chunk)

    def _logprobs_of(self, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(logprobs) if self._logprobs else None
