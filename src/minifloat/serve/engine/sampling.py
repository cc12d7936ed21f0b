"""How the next token is chosen: what a request may ask for, and the choice.

The order is vLLM's, so that the same parameters mean the same: logit_bias, the penalties of repetition (Keskar et al.,
CTRL, 2019), presence and frequency (OpenAI), forbidden tokens (a grammar, min_tokens), temperature, min_p (Nguyen et
al., 2024), top_k, top_p (Holtzman et al., 2019). Log-probabilities are those of the model, before all of it.

A draw takes one number from a counter-based generator (Philox; Salmon et al., SC 2011) keyed by the request's seed, at
the token's position: it does not depend on what else runs, nor on how often the sequence was preempted.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from minifloat.errors import UsageError

if TYPE_CHECKING:
    from minifloat.serve.engine.grammar import Grammar, GrammarState

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000  #: characters
MAX_LOGIT_BIAS = 1024  #: entries
_SEED_BITS = 64
#: Parameters whose defaults a model may bring in generation_config.json.
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
#: Tokens within so much of the largest logit are looked at first where only the most probable tokens can be drawn.
_NEAR = 12.0

Logits = NDArray[np.float32]
Weights = NDArray[np.float64]
Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class SamplingParams:
    """What a request may ask for.

    Attributes:
        temperature: 0 takes the most probable token; otherwise logits are divided by it and a token is drawn.
        top_p: Draw from the smallest set of most probable tokens that together have this probability.
        top_k: Draw from so many most probable tokens; 0: all.
        min_p: Draw from tokens at least so many times as probable as the most probable one.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output.
        presence_penalty: Taken from the logits of tokens in the output.
        frequency_penalty: Taken from them, times how often they are in it.
        seed: Makes draws repeatable; None: another one for every request.
        max_tokens: At most so many; 0: the prompt is read, and nothing follows; None: as many as the context holds.
        min_tokens: At least so many: until then nothing ends the text but a stop string.
        stop: Strings that end the text.
        stop_token_ids: Tokens that end it, beside the model's own.
        ignore_eos: Do not end at the model's end-of-sequence tokens.
        include_stop: Whether the stop string is part of the text.
        logprobs: Report the log-probability of each token and of so many most probable ones beside it; None: nothing.
        prompt_logprobs: The same of the prompt's tokens but the first; all of it is computed then, nothing is shared.
        logit_bias: Added to the logits of tokens.
        grammar: What the text must be.

    Raises:
        UsageError: A value is out of range; the message begins with the attribute's name.
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
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, low, high, open_low in (
            ("temperature", 0.0, 100.0, False),
            ("top_p", 0.0, 1.0, True),
            ("min_p", 0.0, 1.0, False),
            ("repetition_penalty", 0.0, 100.0, True),
            ("presence_penalty", -2.0, 2.0, False),
            ("frequency_penalty", -2.0, 2.0, False),
        ):
            value = getattr(self, name)
            good = math.isfinite(value) and low <= value <= high and not (open_low and value == low)
            if not good:
                raise UsageError(f"{name}: expected {low} {'<' if open_low else '<='} {name} <= {high}, got {value}")
        if self.top_k < 0:
            raise UsageError(f"top_k: expected at least 0, got {self.top_k}")
        if self.seed is not None and not -(2 ** (_SEED_BITS - 1)) <= self.seed < 2**_SEED_BITS:
            raise UsageError(f"seed: expected {_SEED_BITS} bits, got {self.seed}")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise UsageError(f"max_tokens: expected at least 0, got {self.max_tokens}")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise UsageError(f"min_tokens: expected 0 .. max_tokens, got {self.min_tokens}")
        if len(self.stop) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in self.stop):
            raise UsageError(f"stop: expected at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
        if len(self.stop_token_ids) > MAX_STOPS:
            raise UsageError(f"stop_token_ids: expected at most {MAX_STOPS}, got {len(self.stop_token_ids)}")
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            if wanted is not None and not 0 <= wanted <= MAX_LOGPROBS:
                raise UsageError(f"{name}: expected 0 .. {MAX_LOGPROBS}, got {wanted}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS or not all(-100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise UsageError(f"logit_bias: expected at most {MAX_LOGIT_BIAS} values of -100 .. 100")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether the logits are changed before the choice."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_tokens
            or self.grammar is not None
        )


@dataclass(frozen=True)
class TokenLogprob:
    """A token and how probable the model held it.

    Attributes:
        token: Its id.
        text: What it says; a token that is part of a character says U+FFFD.
        raw: Its bytes, or those of `text` where the tokenizer does not tell.
        logprob: Natural logarithm of its probability.
        top: The most probable tokens in its place.
    """

    token: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Choice:
    """A token of a sequence; `logprob` and `top` (ids and log-probabilities) only where they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SamplingState:
    """What the choices of one sequence depend on.

    Args:
        params: The request's.
        prompt: Its prompt's tokens.
        end_tokens: Tokens that `min_tokens` forbids.
        grammar: Where `params` has one: its place in the text so far.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        end_tokens: Sequence[int] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        self.params, self.grammar = params, grammar
        self._key = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed % 2**_SEED_BITS
        self._end = np.array(sorted(end_tokens), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.keys()), dtype=np.int64)
        self._bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._counts: dict[int, int] = {}
        self._seen = dict.fromkeys(prompt) if params.repetition_penalty != 1.0 else {}
        self.length = 0

    def add(self, token: int) -> None:
        """Take note of a token of the output."""
        self.length += 1
        if self.params.presence_penalty or self.params.frequency_penalty:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self.params.repetition_penalty != 1.0:
            self._seen[token] = None
        if self.grammar is not None:
            self.grammar.add(token)

    @property
    def ended(self) -> bool:
        """Whether the grammar lets nothing follow."""
        return self.grammar is not None and self.grammar.done

    def change(self, logits: Logits) -> Logits:
        """The logits ``[vocab]`` as the choice is made by them; the argument is not changed."""
        params = self.params
        logits = logits.copy()
        if params.logit_bias:
            logits[self._bias] += self._bias_values
        if self._seen:
            seen = np.fromiter(self._seen, dtype=np.int64)
            values, penalty = logits[seen], np.float32(params.repetition_penalty)
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        if self._counts:
            tokens = np.fromiter(self._counts.keys(), dtype=np.int64)
            counts = np.fromiter(self._counts.values(), dtype=np.float32)
            logits[tokens] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
        if self.length < params.min_tokens:
            logits[self._end] = -np.inf
        if self.grammar is not None:
            self.grammar.forbid(logits)
        return logits

    def uniform(self) -> float:
        """The number in [0, 1) that the next token is drawn with."""
        return float(np.random.Generator(np.random.Philox(key=self._key, counter=self.length)).random())


class NonFiniteLogits(Exception):
    """The model's logits for a sequence are NaN or Inf."""


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[Choice | Exception]:
    """Choose the next token of each sequence.

    numpy does it, in this thread: torch's threads take longer to meet than these few rows take.

    Args:
        logits: float32 ``[sequences, vocab]`` on the CPU.
        states: Of the sequences.

    Returns:
        Per sequence the choice, or why there is none: `NonFiniteLogits`, or a grammar that came to its limits.
    """
    rows: Logits = logits.numpy()
    choices: list[Choice | Exception] = []
    for row, token, state in zip(rows, rows.argmax(axis=-1).tolist(), states, strict=True):
        try:
            choices.append(_choose(row, state, token))
        except (NonFiniteLogits, UsageError) as error:  # of this sequence; the others go on
            choices.append(error)
    return choices


def _choose(logits: Logits, state: SamplingState, best: int) -> Choice:
    """The next token of one sequence; `best` has the largest logit, or is NaN."""
    if not math.isfinite(logits[best]):
        raise NonFiniteLogits(f"the model's logits are not finite (one is {logits[best]})")
    params, token = state.params, best
    if params.changes_logits or not params.is_greedy:
        changed = state.change(logits) if params.changes_logits else logits
        token = int(changed.argmax()) if params.is_greedy else draw(changed, params, state.uniform())
    if params.logprobs is None:
        return Choice(token)
    shifted = logits.astype(np.float64) - logits[best]
    logprobs = shifted - np.log(np.exp(shifted).sum())
    top = np.argsort(-logprobs, kind="stable")[: params.logprobs]
    return Choice(token, float(logprobs[token]), tuple(zip(top.tolist(), logprobs[top].tolist(), strict=True)))


def draw(logits: Logits, params: SamplingParams, uniform: float) -> int:
    """Draw a token.

    Args:
        logits: float32 ``[vocab]``.
        params: Temperature, min_p, top_k and top_p count here.
        uniform: In [0, 1).

    Returns:
        The first token whose cumulative probability is above `uniform`: in the order of probability where only the
        most probable can be drawn, else in the order of the vocabulary.
    """
    scaled = logits.astype(np.float64) / params.temperature
    scaled -= scaled.max()
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return _invert(np.exp(scaled), uniform)
    # The probable tokens are enough nearly always; where they are not, all are sorted. Both ways give the same token.
    near = _nearest(scaled, np.flatnonzero(scaled >= -_NEAR), params)
    tokens, weights = near or _nearest(scaled, np.arange(len(scaled)), params) or (np.zeros(1, np.int64), np.ones(1))
    return int(tokens[_invert(weights, uniform)])


def _nearest(scaled: Weights, tokens: Tokens, params: SamplingParams) -> tuple[Tokens, Weights] | None:
    """The tokens that can be drawn, most probable first, and their weights.

    Args:
        scaled: Logits of all tokens, the largest of them 0.
        tokens: Of which the answer is sought: no other token has a larger logit than one of these.
        params: As in `draw`.

    Returns:
        None where tokens beyond these might have to be among them.
    """
    limited = bool(params.top_k or params.min_p)
    everything = len(tokens) == len(scaled)
    if 0 < params.top_k < len(tokens):  # few are left to sort
        values = scaled[tokens]
        tokens = tokens[values >= np.partition(values, -params.top_k)[-params.top_k]]
    tokens = tokens[np.argsort(-scaled[tokens], kind="stable")]
    if params.top_k and len(tokens) >= params.top_k:
        tokens, everything = tokens[: params.top_k], True
    weights = np.exp(scaled[tokens])
    if params.min_p and weights[-1] < params.min_p:
        weights, everything = weights[weights >= params.min_p], True
    if limited and not everything:
        return None
    if params.top_p < 1.0:
        total = weights.sum() if limited else np.exp(scaled).sum()
        within = int((weights.cumsum() - weights < params.top_p * total).sum())
        if within == len(weights) and not everything:
            return None
        weights = weights[:within]
    return tokens, weights


def _invert(weights: Weights, uniform: float) -> int:
    """The first index whose cumulative weight is above `uniform` of the whole."""
    sums = weights.cumsum()
    index = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return min(index, len(weights) - 1)
