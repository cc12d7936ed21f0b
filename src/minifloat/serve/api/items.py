"""What Responses and Messages have in common: inputs of typed items, and answers that are lists of parts."""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field
from pydantic_core import from_json

from minifloat.engine import TokenLogprob, TokenUsage
from minifloat.errors import UsageError
from minifloat.serve.api.answers import AnswerPart, CollectedAnswer, Piece, Writer
from minifloat.serve.api.fields import Unicode, check_size
from minifloat.serve.dialog.conversation import Tool, ToolChoice
from minifloat.serve.dialog.events import AnswerText, CallArguments, CallBegins, CallEnds, Event, ThinkingText

MAX_TOOLS = 128
#: A field that clients send and that has no effect here.
Ignored = Annotated[Any, Field(description="Has no effect.")]
Text = Annotated[str, Unicode]
CallId = Annotated[str, Field(min_length=1, max_length=256), Unicode]
ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.:-]{1,128}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
#: How hard a model thinks, as these APIs name it -> as chat templates know it.
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def kind(*known: str, refused: Mapping[str, str], default: str | None = None) -> BeforeValidator:
    """Return a validator of an item that has one of several kinds, by its field `type`.

    Args:
        known: Kinds.
        refused: Kinds, or beginnings of their names, that are refused -> why.
        default: The kind of an item that names none.
    """

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = value.get("type") or default
        if given not in known:
            for name, reason in refused.items():
                if isinstance(given, str) and given.startswith(name):
                    raise ValueError(f"{name} is not supported: {reason}")
            raise ValueError(f"type: expected one of {', '.join(known)}")
        return {**value, "type": given}

    return BeforeValidator(check)


#: Of a union of a text, tagged `str`, and a list, tagged `list`: errors in the list are reported as such.
text_or_list = Discriminator(lambda value: "str" if isinstance(value, str) else "list")


class _Part(Protocol):
    """A piece of a message or of a result."""

    text: str


def joined(content: str | Sequence[_Part]) -> str:
    """Return the text of a content, part by part."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call, from their JSON text."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("expected the JSON text of an object")
    check_size(value)
    return value


def written_arguments(part: AnswerPart, partial: bool | Literal["trailing-strings"] = True) -> dict[str, Any]:
    """Return the arguments of a call that the model wrote, and of one that was cut off its beginning.

    Args:
        partial: Whether the beginning of a text counts too, as the last argument.
    """
    value = from_json(part.text or "{}", allow_partial=partial)
    return value if isinstance(value, dict) else {}


def check_tools(tools: Collection[Tool], choice: ToolChoice) -> None:
    """Refuse tools of one name, too many or too large together, and a choice of tools that there are not."""
    names = {tool.name for tool in tools}
    if len(tools) > MAX_TOOLS:
        raise UsageError(f"tools: expected at most {MAX_TOOLS}, got {len(tools)}")
    if len(names) < len(tools):
        raise UsageError("tools: two of them have the same name")
    try:
        check_size([tool.parameters for tool in tools])
    except ValueError as error:
        raise UsageError(f"tools: together, {error}") from error
    if choice.mode == "required" and not tools:
        raise UsageError("tool_choice: it asks for a call, and there are no tools")
    if not names.issuperset(choice.names):
        raise UsageError("tool_choice: it names a tool that is not among tools")


class StreamEvent(BaseModel):
    """An event of a stream."""

    model_config = ConfigDict(extra="allow")

    type: str

    @classmethod
    def of(cls, type: str, **fields: Any) -> StreamEvent:
        return cls.model_construct(type=type, **fields)


class PartWriter(Writer):
    """Writes the one answer of a response as a list of parts: thinking, texts and calls.

    Attributes:
        call_prefix: What the ids of calls begin with.
    """

    end = b""
    call_prefix = "call_"

    def __init__(self) -> None:
        super().__init__()
        self._streamed = CollectedAnswer()
        self._is_open = False

    @abstractmethod
    def _begin(self, index: int, part: AnswerPart) -> Iterable[StreamEvent]:
        """Return the events of a part that begins."""

    @abstractmethod
    def _more(self, index: int, part: AnswerPart, text: str, logprobs: Sequence[TokenLogprob]) -> Iterable[StreamEvent]:
        """Return the events of more text of a part, with the log-probabilities of its tokens if they are wanted."""

    @abstractmethod
    def _finish(self, index: int, part: AnswerPart) -> Iterable[StreamEvent]:
        """Return the events of a part that ends."""

    @abstractmethod
    def _ending(self, usage: TokenUsage) -> Iterable[StreamEvent]:
        """Return the events after the last part."""

    def piece(self, index: int, piece: Piece) -> Iterable[StreamEvent]:
        for event in piece.events:
            yield from self._add(event)
        self._streamed.end(piece)

    def _add(self, event: Event) -> Iterable[StreamEvent]:
        match event:
            case AnswerText(text, logprobs):
                yield from self._continue("text", text, logprobs)
            case ThinkingText(text):
                yield from self._continue("thinking", text)
            case CallBegins(_, id, name):
                yield from self._open(AnswerPart("call", id=id, name=name))
            case CallArguments(_, text):
                yield from self._continue("call", text)
            case CallEnds():
                self._streamed.parts[-1].complete = True
                yield from self._close()

    def _continue(
        self, kind: Literal["text", "thinking", "call"], text: str, logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterable[StreamEvent]:
        parts = self._streamed.parts
        if not self._is_open or parts[-1].kind != kind:
            yield from self._open(AnswerPart(kind))
        parts[-1].pieces.append(text)
        parts[-1].logprobs += logprobs
        yield from self._more(len(parts) - 1, parts[-1], text, logprobs)

    def _open(self, part: AnswerPart) -> Iterable[StreamEvent]:
        yield from self._close()
        self._streamed.parts.append(self._named(part))
        self._is_open = True
        yield from self._begin(len(self._streamed.parts) - 1, part)

    def _close(self) -> Iterable[StreamEvent]:
        if self._is_open:
            self._is_open = False
            yield from self._finish(len(self._streamed.parts) - 1, self._streamed.parts[-1])

    def _named(self, part: AnswerPart) -> AnswerPart:
        """Return the part, with an id if it is a call without one."""
        if part.kind == "call":
            part.id = part.id or self.call_prefix + secrets.token_hex(12)
        return part

    def closing(self, usage: TokenUsage) -> Iterable[StreamEvent]:
        yield from self._close()
        yield from self._ending(usage)

    def encode(self, event: BaseModel) -> bytes:
        name = event.type if isinstance(event, StreamEvent) else "error"
        return f"event: {name}\n".encode() + super().encode(event)
