"""A request, what has become of it so far, and what is told of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from enum import Enum

from minifloat.serve.engine.sampling import SamplingParams, SamplingState, TokenLogprob
from minifloat.serve.engine.text import TextStream


@dataclass(frozen=True)
class Request:
    """What somebody wants.

    Attributes:
        request_id: Unique among the requests that are not finished.
        prompt: Token ids, at least one.
        params: How tokens are chosen and when to stop.
        cache_salt: Only requests with the same salt share blocks of the KV cache.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""


@dataclass(frozen=True)
class Usage:
    """What a request took, in tokens: of its prompt, of its output, and of the prompt those found in the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass
class Timings:
    """When things happened to a request, in seconds of `time.monotonic`; None: not yet."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True)
class Delivery:
    """What one step made for one request.

    Attributes:
        request_id: Whose.
        tokens: New token ids.
        text: New text, complete characters only; what may turn out to begin a stop string waits.
        logprobs: Of each new token, where asked for.
        finish_reason: "stop", "length", "cancelled" or "error" with the last delivery, else None.
        stop_reason: The stop string or the stop token id, where one of the request's own ended it.
        error: What went wrong, with the reason "error".
        usage: With the last delivery.
        timings: With the last delivery.
        prompt_logprobs: Of the prompt's tokens, where asked for, with the first delivery; the first token's is None.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def renamed(self, request_id: str) -> Delivery:
        """The same for a request of another name."""
        return replace(self, request_id=request_id)

    def __add__(self, later: Delivery) -> Delivery:
        """This one and the next of the same request as one."""
        logprobs = (
            None if self.logprobs is None and later.logprobs is None else (self.logprobs or ()) + (later.logprobs or ())
        )
        return Delivery(
            self.request_id,
            self.tokens + later.tokens,
            self.text + later.text,
            logprobs,
            later.finish_reason,
            self.stop_reason if later.stop_reason is None else later.stop_reason,
            later.error,
            later.usage,
            later.timings,
            self.prompt_logprobs if later.prompt_logprobs is None else later.prompt_logprobs,
        )


@dataclass(frozen=True)
class Completion:
    """All that a request made: see `Delivery` for the fields."""

    request_id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None

    @classmethod
    def of(cls, request: Request, delivery: Delivery) -> Completion:
        """What all deliveries of a request add up to.

        Raises:
            RuntimeError: It ended with an error.
        """
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
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """A request on its way through the engine.

    Args:
        request: What is wanted.
        text: Turns its tokens into text.
        sampling: The state of its choices.
        root: What its prefix is known by (`BlockPool.root`).

    Attributes:
        tokens: Prompt and output.
        computed: Of `tokens` from the start, those whose keys and values are in the cache.
        blocks: The cache's blocks that hold them, in order.
        digests: Of its full blocks, as far as they have been asked for.
        prompt_logprobs: Where they are asked for: of the prompt's second token and those after it, as far as known.
        cached: Tokens that were found in the cache when it was first scheduled.
        state: Where it is.
        preempted: How often it lost its blocks to others.
    """

    def __init__(self, request: Request, text: TextStream, sampling: SamplingState, root: bytes) -> None:
        self.request = request
        self.text = text
        self.sampling = sampling
        self.root = root
        self.tokens = list(request.prompt)
        self.computed = 0
        self.blocks: list[int] = []
        self.digests: list[bytes] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.cached: int | None = None
        self.state = State.WAITING
        self.preempted = 0
        self.timings = Timings(time.monotonic())
        self.last_token: float | None = None

    @property
    def request_id(self) -> str:
        """That of the request."""
        return self.request.request_id

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def output(self) -> list[int]:
        """The tokens made so far."""
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        """How many tokens have been made."""
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens that must be computed before the next can be chosen."""
        return len(self.tokens) - self.computed

    @property
    def unscored(self) -> int:
        """Tokens of the prompt whose log-probabilities are asked for and not known yet."""
        wanted = self.request.params.prompt_logprobs is not None
        return self.prompt_length - 1 - len(self.prompt_logprobs) if wanted else 0

    @property
    def usage(self) -> Usage:
        """What it took so far."""
        return Usage(self.prompt_length, self.output_length, min(self.cached or 0, self.prompt_length))
