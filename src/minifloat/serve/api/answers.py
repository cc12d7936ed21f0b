"""Answers as they come, whatever API a client speaks: their events, collected or handed to a writer piece by piece."""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, Protocol, cast

from pydantic import BaseModel

from minifloat.engine import Delivery, TokenLogprob, TokenUsage
from minifloat.serve.dialog.events import AnswerText, CallArguments, CallBegins, CallEnds, Event, ThinkingText
from minifloat.serve.server.errors import APIError

#: Why the engine ended a text. `Generation` raises for texts that failed or were cancelled.
FinishReason = Literal["stop", "length"]


class Parser(Protocol):
    """Reads the text of one answer, as `dialog.parser.AnswerParser` does."""

    def add(self, piece: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class PlainText:
    """The parser of an answer that is nothing but text."""

    def add(self, piece: str) -> list[Event]:
        return [AnswerText(piece)] if piece else []

    def finish(self) -> list[Event]:
        return []


@dataclass(frozen=True)
class Piece:
    """What is new of an answer.

    Attributes:
        events: That its new text says.
        delivery: Of the engine, with the log-probabilities, and the reasons of the end in the last.
    """

    events: Sequence[Event]
    delivery: Delivery

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended; None: it goes on."""
        return cast(FinishReason | None, self.delivery.finish_reason)

    @property
    def text(self) -> str:
        """The new text of the answer itself."""
        return "".join([event.text for event in self.events if isinstance(event, AnswerText)])


@dataclass
class AnswerPart:
    """A part of an answer: consecutive text, consecutive thinking, or a call with the JSON text of its arguments."""

    kind: Literal["text", "thinking", "call"]
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of text
    id: str = ""
    name: str = ""
    complete: bool = False  # of a call: whether it was not cut off

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class CollectedAnswer:
    """All pieces of one answer, joined; `parts` are in the order in which the model wrote them."""

    def __init__(self) -> None:
        self.parts: list[AnswerPart] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.usage = TokenUsage(0, 0, 0)
        self._calls: dict[int, AnswerPart] = {}

    def add(self, piece: Piece) -> None:
        for event in piece.events:
            self._add(event)
        self.tokens += piece.delivery.tokens
        self.logprobs += piece.delivery.logprobs or ()
        self.prompt_logprobs = piece.delivery.prompt_logprobs or self.prompt_logprobs
        self.end(piece)

    def end(self, piece: Piece) -> None:
        """Take in why a text ended and its usage, if this is its last piece; text is not kept."""
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.delivery.stop_reason
            self.usage = piece.delivery.usage or self.usage

    def _add(self, event: Event) -> None:
        match event:
            case AnswerText(text, logprobs):
                self._last("text").pieces.append(text)
                self._last("text").logprobs += logprobs
            case ThinkingText(text):
                self._last("thinking").pieces.append(text)
            case CallBegins(index, id, name):
                self._calls[index] = AnswerPart("call", id=id, name=name)
                self.parts.append(self._calls[index])
            case CallArguments(index, text):
                self._calls[index].pieces.append(text)
            case CallEnds(index):
                self._calls[index].complete = True

    def _last(self, kind: Literal["text", "thinking"]) -> AnswerPart:
        if not self.parts or self.parts[-1].kind != kind:
            self.parts.append(AnswerPart(kind))
        return self.parts[-1]

    @property
    def text(self) -> str:
        """The text of the answer, without thinking and calls."""
        return "".join(part.text for part in self.parts if part.kind == "text")

    @property
    def thinking(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "thinking")

    @property
    def calls(self) -> list[AnswerPart]:
        return list(self._calls.values())


class TextScores:
    """Finds the log-probabilities of the tokens of an answer's text among those of thinking, calls and their frames."""

    def __init__(self) -> None:
        self._pending: list[TokenLogprob] = []

    def add(self, events: Sequence[Event], logprobs: Iterable[TokenLogprob]) -> list[Event]:
        """Return new events, whose last text has the log-probabilities of the tokens that wrote them.

        Args:
            events: Of one piece.
            logprobs: Of its tokens. They are kept while their text is held back.
        """
        self._pending += logprobs
        found = list(events)
        texts = [event for event in found if isinstance(event, AnswerText)]
        if texts:
            text = "".join(event.text for event in texts).encode()
            scored = replace(texts[-1], logprobs=self._of(text))
            found = [scored if event is texts[-1] else event for event in found]
        if found:
            self._pending = []
        return found

    def _of(self, text: bytes) -> tuple[TokenLogprob, ...]:
        joined = b"".join(token.raw for token in self._pending)
        ends = list(accumulate(len(token.raw) for token in self._pending))
        borders = {0, *ends}
        places = [match.start() for match in re.finditer(b"(?=" + re.escape(text) + b")", joined)]
        if not places:  # bytes that are no text became another character
            return tuple(self._pending)
        first = max(places, key=lambda place: ((place in borders) + (place + len(text) in borders), place))
        spans = zip([0, *ends], ends, self._pending, strict=False)
        return tuple(token for start, end, token in spans if end > first and start < first + len(text))


def total_usage(answers: Sequence[CollectedAnswer], per_prompt: int) -> TokenUsage:
    """Return the tokens of all answers, and of each prompt once."""
    prompts = [answer.usage for answer in answers[::per_prompt]]
    return TokenUsage(
        sum(usage.prompt_tokens for usage in prompts),
        sum(answer.usage.completion_tokens for answer in answers),
        sum(usage.cached_tokens for usage in prompts),
        sum(answer.usage.thinking_tokens for answer in answers),
    )


class Writer(ABC):
    """Writes the answers of one API to one request: whole, or event by event.

    Attributes:
        name: Random, for ids.
        prompts: The tokens of each prompt, known from the opening on.
        end: The last bytes of every stream.
        ping: What a stream carries while there is nothing else to say; empty: nothing.
        scores_text: Whether `AnswerText` has the log-probabilities of its tokens.
    """

    end = b"data: [DONE]\n\n"
    ping = b""
    scores_text = False

    def __init__(self) -> None:
        self.name = secrets.token_hex(12)
        self.prompts: Sequence[tuple[int, ...]] = ()

    @abstractmethod
    def answer(self, answers: Sequence[CollectedAnswer], usage: TokenUsage) -> BaseModel:
        """Return the body of a whole answer; fields that are not set are left out."""

    @abstractmethod
    def opening(self) -> Iterable[BaseModel]:
        """Return the events of a stream before the first token."""

    @abstractmethod
    def piece(self, index: int, piece: Piece) -> Iterable[BaseModel]:
        """Return the events of what is new of the answer with this index."""

    @abstractmethod
    def closing(self, usage: TokenUsage) -> Iterable[BaseModel]:
        """Return the events after the last piece of the last answer."""

    def encode(self, event: BaseModel) -> bytes:
        return b"data: " + event.model_dump_json(exclude_unset=True).encode() + b"\n\n"

    def failure(self, error: APIError) -> bytes:
        """Return the last events of a stream that fails."""
        return self.encode(error.body) + self.end
