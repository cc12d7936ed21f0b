"""`SamplingParams`: what a request asks of the choice of its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from minifloat.errors import UsageError

if TYPE_CHECKING:
    from minifloat.engine.grammar import Grammar

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000  #: characters
MAX_LOGIT_BIAS = 1024  #: entries
SEED_BITS = 64
_MAX_TOP_K = 2**31 - 1
#: Parameters whose defaults generation_config.json may contain.
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen, when its text ends, and what is reported.

    Attributes:
        temperature: 0 takes the most probable token; otherwise logits are divided by it and a token is drawn.
        top_p: Draw from the smallest set of most probable tokens that together have this probability.
        top_k: Draw from this number of most probable tokens; 0: all.
        min_p: Draw from tokens that are at least this fraction as probable as the most probable one.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output; 0.01 .. 100.
        presence_penalty: Subtracted from the logits of tokens that are in the output.
        frequency_penalty: Subtracted from the logits of tokens in the output, once for each occurrence.
        seed: Makes draws repeatable; None: a random seed for each request.
        max_tokens: Tokens at most; 0: only the prompt is computed; None: as many as the context holds.
        min_tokens: Tokens at least: until then only a stop string ends the text.
        stop: Strings that end the text.
        stop_token_ids: Tokens that end the text, beside the model's own.
        ignore_eos: Do not end at the model's end-of-sequence tokens.
        include_stop: Whether the stop string is part of the text.
        logprobs: Report the log-probability of each token and of this number of most probable tokens; None: none.
        prompt_logprobs: The same for the tokens of the prompt from `prompt_logprobs_start` on. The logits that score
            them are computed, whatever the KV cache holds.
        prompt_logprobs_start: Index of the first token of the prompt whose log-probability is reported, at least 1. The
            tokens before it may come from the KV cache.
        logit_bias: Added to the logits of tokens, by token id.
        grammar: Rules that the text must follow; None: none.

    Raises:
        UsageError: If a value is out of range; the message begins with the attribute's name.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 1
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, low, high, open_low in (
            ("temperature", 0.0, 100.0, False),
            ("top_p", 0.0, 1.0, True),
            ("min_p", 0.0, 1.0, False),
            ("repetition_penalty", 0.01, 100.0, False),
            ("presence_penalty", -2.0, 2.0, False),
            ("frequency_penalty", -2.0, 2.0, False),
        ):
            value = getattr(self, name)
            is_valid = math.isfinite(value) and low <= value <= high and not (open_low and value == low)
            if not is_valid:
                raise UsageError(f"{name}: expected {low} {'<' if open_low else '<='} {name} <= {high}, got {value}")
        if not 0 <= self.top_k <= _MAX_TOP_K:
            raise UsageError(f"top_k: expected 0 .. {_MAX_TOP_K}, got {self.top_k}")
        if self.seed is not None and not -(2 ** (SEED_BITS - 1)) <= self.seed < 2**SEED_BITS:
            raise UsageError(f"seed: expected {SEED_BITS} bits, got {self.seed}")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise UsageError(f"max_tokens: expected at least 0, got {self.max_tokens}")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise UsageError(f"min_tokens: expected 0 .. max_tokens, got {self.min_tokens}")
        if len(self.stop) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in self.stop):
            raise UsageError(f"stop: expected at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
        if len(self.stop_token_ids) > MAX_STOPS:
            raise UsageError(f"stop_token_ids: expected at most {MAX_STOPS}, got {len(self.stop_token_ids)}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise UsageError(f"{name}: expected 0 .. {MAX_LOGPROBS}, got {count}")
        if self.prompt_logprobs_start < 1:
            raise UsageError(f"prompt_logprobs_start: expected at least 1, got {self.prompt_logprobs_start}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS or not all(-100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise UsageError(f"logit_bias: expected at most {MAX_LOGIT_BIAS} values of -100 .. 100")

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0

    @cached_property
    def limits(self) -> bool:
        """Whether only the most probable tokens can be drawn."""
        return bool(self.top_k or self.min_p or self.top_p < 1.0)

    @cached_property
    def changes_logits(self) -> bool:
        """Whether any parameter changes the logits before a token is chosen."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_tokens
            or self.grammar is not None
        )
