"""Requests, their state in the engine, and what the engine delivers for them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain

from minifloat.engine.pooling import PooledText, Vector
from minifloat.engine.sampling import SamplingParams, SamplingState, TokenLogprob
from minifloat.engine.text import TextStream


@dataclass(frozen=True)
class Request:
    """A prompt and how it is continued; requests of a lower `priority` leave the queue first."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True)
class TokenUsage:
    """Tokens of a request.

    Attributes:
        prompt_tokens: Of its prompt.
        completion_tokens: Of its output.
        cached_tokens: Of its prompt that were found in the cache.
        thinking_tokens: Of its output that are thinking, with the texts around it.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    thinking_tokens: int = 0


@dataclass
class Timings:
    """Times of the events of a request, in seconds of `time.monotonic`; None: not yet."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True)
class Delivery:
    """The new tokens and text of one request after one step."""

    request_id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None  # "stop", "length", "cancelled" or "error" in the last delivery
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the text
    error: str | None = None
    usage: TokenUsage | None = None
    timings: Timings | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    caused_by_request: bool = False
    pooled: Vector | None = None  # what the text became, of a model that does not generate

    def renamed(self, request_id: str) -> Delivery:
        return replace(self, request_id=request_id)

    def __add__(self, later: Delivery) -> Delivery:
        return Delivery.joined([self, later])

    @staticmethod
    def joined(deliveries: Sequences[Delivery]) -> Delivery:
        """Join deliveries of one request, at least one, in their order."""
        last = deliveries[-1]
        logprobs = [each.logprobs for each in deliveries if each.logprobs is not None]
        prompt_logprobs = [each.prompt_logprobs for each in deliveries if each.prompt_logprobs is not None]
        stop_reasons = [each.stop_reason for each in deliveries if each.stop_reason is not None]
        return Delivery(
            last.request_id,
            tuple(chain.from_iterable(each.tokens for each in deliveries)),
            "".join(each.text for each in deliveries),
            tuple(chain.from_iterable(logprobs)) if logprobs else None,
            last.finish_reason,
            stop_reasons[-1] if stop_reasons else None,
            last.error,
            last.usage,
            last.timings,
            prompt_logprobs[-1] if prompt_logprobs else None,
            any(each.caused_by_request for each in deliveries),
            next((each.pooled for each in deliveries if each.pooled is not None), None),
        )


@dataclass(frozen=True)
class GeneratedText:
    """All deliveries of a request joined; the fields are those of `Delivery`."""

    request_id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str
    stop_reason: str | int | None
    usage: TokenUsage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None

    @classmethod
    def of(cls, request: Request, delivery: Delivery) -> GeneratedText:
        if delivery.finish_reason == "error":
            raise RuntimeError(f"prompt {delivery.request_id}: {delivery.error}")
        assert delivery.finish_reason is not None
        assert delivery.usage is not None
        assert delivery.timings is not None
        return cls(
            delivery.request_id,
            request.prompt,
            delivery.tokens,
            delivery.text,
            delivery.logprobs,
            delivery.finish_reason,
            delivery.stop_reason,
            delivery.usage,
            delivery.timings,
            delivery.prompt_logprobs,
        )


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """A request in the engine, with the tokens made so far."""

    def __init__(
        self, request: Request, text: TextStream, sampling: SamplingState, root: bytes, max_length: int = sys.maxsize
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.prompt_length = len(request.prompt)
        self.max_length = max_length
        self.text = text
        self.sampling = sampling
        self.root = root
        self.tokens = list(request.prompt)
        self.computed = 0
        self.blocks: list[int] = []
        self.digests: list[bytes] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.cached: int | None = None  # tokens found in the cache at first; None: not scheduled yet
        self.state = State.WAITING
        self.preempted = 0
        self.slot: int | None = None  # its number among those that run; None: it waits
        self.snapshots: tuple[int, ...] = ()
        self.timings = Timings(time.monotonic())
        self.last_token: float | None = None
        self.pooled: PooledText | None = None  # of a model that makes a vector of a text, and no text

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """Number of tokens that must be computed before the next token can be chosen."""
        return len(self.tokens) - self.computed

    @property
    def unscored(self) -> int:
        """Number of the prompt's tokens whose log-probabilities are still to be computed; 0 if none are asked for."""
        return 0 if self.request.params.prompt_logprobs is None else max(self.prompt_length - self.next_scored, 0)

    @property
    def next_scored(self) -> int:
        """Index of the token of the prompt whose log-probability is computed next."""
        return self.request.params.prompt_logprobs_start + len(self.prompt_logprobs)

    @property
    def reported_scores(self) -> tuple[TokenLogprob | None, ...]:
        """The log-probabilities of the prompt's tokens so far; None for those that are not asked for."""
        return (None,) * self.request.params.prompt_logprobs_start + tuple(self.prompt_logprobs)

    @property
    def only_scores(self) -> bool:
        """Whether the request asks for log-probabilities of its prompt and for no token."""
        params = self.request.params
        return params.prompt_logprobs is not None and params.max_tokens == 0 and self.prompt_length > 1

    @property
    def computable(self) -> int:
        """Number of tokens, from the first, that are to be computed; the last token of a prompt scores nothing."""
        return len(self.tokens) - self.only_scores

    @property
    def usage(self) -> TokenUsage:
        cached = min(self.cached or 0, self.prompt_length)
        return TokenUsage(self.prompt_length, self.output_length, cached, self.text.thinking_tokens)
