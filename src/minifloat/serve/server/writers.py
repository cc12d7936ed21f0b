"""Turn the engine's deliveries into the bodies of answers: a whole answer, or chunk by chunk."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

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
    """Return the log-probabilities of the tokens of a prompt.

    A first token that the tokenizer added, which the prompt's text does not begin with, takes no characters.
    """
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
