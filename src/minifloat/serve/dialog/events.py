"""What happens in an answer, in the order in which the model writes it; every API writes its chunks from these."""

from __future__ import annotations

from dataclasses import dataclass

from minifloat.engine import TokenLogprob


@dataclass(frozen=True)
class AnswerText:
    """More text of the answer, with the log-probabilities of its tokens where an API asks for them."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ThinkingText:
    """More text of the thinking before the answer, or between calls."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """The model calls a tool; calls are numbered from 0. The id is the one that the model wrote, or else empty."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments of a call: the pieces together are the JSON text of an object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnds:
    """The arguments of a call are complete; a call that is cut off never ends."""

    index: int


Event = AnswerText | ThinkingText | CallBegins | CallArguments | CallEnds
