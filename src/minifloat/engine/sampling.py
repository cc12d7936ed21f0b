"""Sampling parameters, and the choice of the next token.

The order is vLLM's, so that the same parameters have the same effect: logit_bias, the penalties of repetition (Keskar
et al., CTRL, 2019), presence and frequency (OpenAI), forbidden tokens (a grammar, min_tokens), temperature, min_p
(Nguyen et al., 2024), top_k, top_p (Holtzman et al., 2019). Log-probabilities are those of the model, before any of
these steps.

A draw takes its numbers from a counter-based generator (Philox; Salmon et al., SC 2011), keyed by the request's seed,
at the token's position: a draw depends neither on the other sequences nor on how often its own sequence was preempted.

There are two ways to draw. An engine that does not speculate inverts the cumulative probabilities at one number. One
that does lets all tokens race: each gets an exponentially distributed time with its probability as the rate, and the
first wins, which is the Gumbel-max trick (Maddison et al., "A* Sampling", NeurIPS 2014). Two models that race with the
same times agree nearly as often as their probabilities allow (Daliri et al., "Coupling without communication and
drafter-invariant speculative decoding", 2024), and the result does not depend on what a draft model proposed.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from minifloat.engine.grammar import GrammarPending
from minifloat.errors import UsageError
from minifloat.kernels.draw import Logits, Weights, draw_rows, invert, weights_of

if TYPE_CHECKING:
    from minifloat.engine.grammar import Grammar, GrammarState

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000  #: characters
MAX_LOGIT_BIAS = 1024  #: entries
MAX_BAD_TOKENS = 65536  #: of all forbidden sequences
SEED_BITS = 64
_MAX_TOP_K = 2**31 - 1
#: Parameters whose defaults generation_config.json may contain.
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Thinking:
    """How a text begins that thinks before it answers.

    Attributes:
        open: What the thinking begins with. A text that begins with anything else does not think.
        close: Texts of which the first one ends it.
        begun: Whether the prompt has begun it.
        budget: Tokens of the thinking after which `closing` follows; None: any number.
        closing: Tokens that end it.

    Raises:
        UsageError: If a budget is negative, or has no tokens that end the thinking.
    """

    open: str
    close: tuple[str, ...]
    begun: bool = False
    budget: int | None = None
    closing: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not all((self.open, *self.close)) or not self.close:
            raise UsageError("thinking: expected texts that begin and end it")
        if self.budget is not None and (self.budget < 0 or not self.closing):
            raise UsageError(f"thinking: expected a budget of at least 0 and tokens that end it, got {self.budget}")


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
        forbidden: Sequences of tokens that the output never has.
        grammar: Rules that the text must follow; None: none.
        visible: Special tokens that are part of the text; others are left out.
        thinking: How the text begins if it thinks, which stop strings do not end; None: it does not.

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
    forbidden: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    visible: frozenset[int] = frozenset()
    thinking: Thinking | None = None

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
        if not all(self.forbidden) or sum(map(len, self.forbidden)) > MAX_BAD_TOKENS:
            raise UsageError(f"forbidden: expected sequences of 1 token or more, of at most {MAX_BAD_TOKENS} in all")

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
        """Whether any parameter changes the logits before a token is chosen, or chooses it."""
        return self.weighs_tokens or (self.thinking is not None and self.thinking.budget is not None)

    @cached_property
    def weighs_tokens(self) -> bool:
        """Whether any parameter changes the logits of a token by the tokens before it, or of all tokens."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.forbidden
            or self.min_tokens
            or self.grammar is not None
        )


#: For top_p, tokens with at least these weights are tried in turn, so that few are sorted; then all are.
_LEAST_WEIGHTS = (1e-2, 1e-4, 1e-6)
#: A sum of weights is only known to be larger than another if it is so by more than their rounding.
_MARGIN = 1 + 1e-9
_LOW_31_BITS = 0x7FFFFFFF
#: Tokens of a group in the search for the largest logits.
_GROUP = 64

Tokens = NDArray[np.int64]


def draw(logits: Logits, params: SamplingParams, uniform: float) -> int:
    if not params.limits:
        return draw_rows(logits[None], [float(logits.max())], [params.temperature], [uniform])[0]
    tokens, weights = _distribution(logits, params)
    assert tokens is not None
    return int(tokens[invert(weights, uniform)])


def race(logits: Logits, params: SamplingParams, times: Weights) -> int:
    tokens, weights = _distribution(logits, params)
    if tokens is None:
        return int((weights / times).argmax())
    return int(tokens[(weights / times[tokens]).argmax()])


def _distribution(logits: Logits, params: SamplingParams) -> tuple[Tokens | None, Weights]:
    """Return the tokens that can be drawn, None for all, and numbers in proportion to their probabilities."""
    if not params.limits:
        return None, weights_of(logits, logits.max(), params.temperature)
    tokens, total = _candidates(logits, params)
    tokens = _most_probable_first(logits, tokens)[: params.top_k or None]
    weights = weights_of(logits[tokens], logits[tokens[0]], params.temperature)
    weights = weights[weights >= params.min_p]
    if params.top_p < 1.0:
        total = weights.sum() if total is None else total
        weights = weights[weights.cumsum() - weights < params.top_p * total]
    return tokens[: len(weights)], weights


def _candidates(logits: Logits, params: SamplingParams) -> tuple[Tokens, np.float64 | None]:
    """Return tokens that contain all that can be drawn, as few as are found quickly."""
    if params.top_k:
        return np.flatnonzero(logits >= _lower_bound(logits, params.top_k)), None
    weights = weights_of(logits, logits.max(), params.temperature)
    if params.min_p:
        return np.flatnonzero(weights >= params.min_p), None
    total = weights.sum()
    for least in _LEAST_WEIGHTS:
        found = np.flatnonzero(weights >= least)
        if weights[found].sum() > params.top_p * total * _MARGIN:
            return found, total
    return np.arange(len(logits)), total


def _lower_bound(logits: Logits, count: int) -> float:
    """Return a number that at least `count` logits reach, and few more if `count` is small."""
    # the `count`-th largest of the maxima of groups of tokens; that of all logits takes longer to find
    width = len(logits) // _GROUP
    if count >= len(logits):
        return -math.inf
    if count > width:
        return float(np.partition(logits, -count)[-count])
    maxima = logits[: width * _GROUP].reshape(_GROUP, width).max(axis=0)
    return float(np.partition(maxima, -count)[-count])


def _most_probable_first(logits: Logits, tokens: Tokens) -> Tokens:
    """Return tokens by their logits, the largest first, and by their ids where logits are equal."""
    # numpy sorts integers faster than it finds the order of floats, so the keys contain logit and token
    bits = (logits[tokens] + np.float32(0)).view(np.int32).astype(np.int64)  # the sum makes -0 and 0 equal
    keys = (np.where(bits < 0, bits ^ _LOW_31_BITS, bits) << 32) | (_LOW_31_BITS - tokens)
    keys.sort()
    return _LOW_31_BITS - (keys[::-1] & _LOW_31_BITS)


#: Numbers that Philox makes per count, of which a position takes the first.
_PHILOX_BLOCK = 4
#: Positions whose numbers are generated at a time.
_POSITIONS = 64
_NONE: list[float] = []
#: Philox's counter at the times of the first position; those of the next begin `_RACE_STRIDE` later. Far from the
#: counters of `SamplingState.uniform`, so that the numbers differ.
_FIRST_RACE, _RACE_STRIDE = 1 << 192, 1 << 64
#: Seconds that a step waits for grammars that answer late.
_GRAMMAR_SECONDS = 0.01
_LEAST_TIME = np.finfo(np.float64).tiny  #: keeps quotients finite


class ForbiddenTokens:
    """Finds the tokens that would end one of several sequences of tokens."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._always = [tokens[0] for tokens in sequences if len(tokens) == 1]
        self._after: dict[int, list[tuple[list[int], int]]] = {}
        for *before, last in sequences:
            if before:
                self._after.setdefault(before[-1], []).append((before, last))
        self._longest = max(map(len, sequences)) - 1
        self._recent: list[int] = []

    def add(self, token: int) -> None:
        if self._longest:
            self._recent = [*self._recent, token][-self._longest :]

    def now(self) -> list[int]:
        recent = self._recent
        ending = self._after.get(recent[-1], ()) if recent else ()
        return self._always + [last for before, last in ending if recent[-len(before) :] == before]


class SamplingState:
    """The state of one sequence that the choice of its next token depends on."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        end_tokens: Sequence[int] = (),
        grammar: GrammarState | None = None,
        *,
        races: bool = False,
    ) -> None:
        self.params, self.grammar, self.races = params, grammar, races
        self._key = secrets.randbits(SEED_BITS) if params.seed is None else params.seed % 2**SEED_BITS
        self._end = np.array(sorted(end_tokens), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.keys()), dtype=np.int64)
        self._bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._forbidden = ForbiddenTokens(params.forbidden) if params.forbidden else None
        self._counts: dict[int, int] = {}
        self._seen = dict.fromkeys(prompt) if params.repetition_penalty != 1.0 else {}
        self._counts_tokens = bool(params.presence_penalty or params.frequency_penalty)
        self._uniform, self._first_uniform = _NONE, 0
        self._times: dict[int, Weights] = {}
        #: The next tokens, whatever the logits say, from the last to the first.
        self._forced: list[int] = []
        self.length = 0

    def force(self, tokens: Sequence[int]) -> None:
        """Let these tokens be the next; only for parameters that change logits, and none of them can be a draft."""
        self._forced = list(reversed(tokens))

    @property
    def forced(self) -> int | None:
        """The next token, if it is known already."""
        return self._forced[-1] if self._forced else None

    def add(self, token: int) -> None:
        self.length += 1
        if not self.params.changes_logits:
            return
        if self._forced:
            self._forced.pop()
        if self._forbidden is not None:
            self._forbidden.add(token)
        if self._counts_tokens:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self.params.repetition_penalty != 1.0:
            self._seen[token] = None
        if self.grammar is not None:
            self.grammar.add(token)

    def change(self, logits: Logits) -> Logits:
        """Return the logits ``[vocab]`` after biases, penalties and forbidden tokens; the argument is not changed."""
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
        if self._forbidden is not None:
            logits[self._forbidden.now()] = -np.inf
        if self.grammar is not None:
            self.grammar.forbid(logits)
        if self.length < params.min_tokens:
            ends = logits[self._end]
            logits[self._end] = -np.inf
            if self.grammar is not None and not np.isfinite(logits.max()):  # the grammar allows only the end
                logits[self._end] = ends
        return logits

    def uniform(self, ahead: int = 0) -> float:
        """Return the number in [0, 1) that a token is drawn with: the first of Philox's block at its position."""
        position = self.length + ahead
        index = position - self._first_uniform
        if not 0 <= index < len(self._uniform):
            # for several positions, because making a generator takes longer than their numbers
            generator = np.random.Generator(np.random.Philox(key=self._key, counter=position))
            self._uniform = generator.random(_POSITIONS * _PHILOX_BLOCK)[::_PHILOX_BLOCK].tolist()
            self._first_uniform, index = position, 0
        return self._uniform[index]

    def times(self, vocab: int, ahead: int = 0) -> Weights:
        """Return the times ``[vocab]`` of a race: draws of the exponential distribution of rate 1 at its position."""
        position = self.length + ahead
        if position not in self._times:
            self._times = {known: times for known, times in self._times.items() if known >= self.length}
            counter = _FIRST_RACE + position * _RACE_STRIDE
            generator = np.random.Generator(np.random.Philox(key=self._key, counter=counter))
            self._times[position] = np.maximum(generator.standard_exponential(vocab), _LEAST_TIME)
        return self._times[position]

    @property
    def draws_from_all(self) -> bool:
        """Whether a token is drawn at one number, from all tokens by the logits of the model."""
        params = self.params
        return not (self.races or params.is_greedy or params.limits or params.changes_logits)

    def draw(self, logits: Logits, ahead: int = 0) -> int:
        """Draw a token by logits ``[vocab]``, which `change` has changed."""
        if self.races:
            return race(logits, self.params, self.times(len(logits), ahead))
        return draw(logits, self.params, self.uniform(ahead))


def await_grammars(states: Sequence[SamplingState], *, until_added: bool = False) -> None:
    """Wait, for a moment, for the grammars of some sequences, but not for those that were late the last time."""
    grammars = [state.grammar for state in states if state.grammar is not None]
    prompt = [grammar for grammar in grammars if not grammar.late]
    if prompt:
        prompt[0].grammars.wait(prompt, _GRAMMAR_SECONDS, until_added=until_added)
    if not until_added:
        for grammar in grammars:
            grammar.late = not grammar.known


@dataclass(frozen=True)
class TokenLogprob:
    token: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


class TokenChoice(NamedTuple):
    """The token that was chosen for a sequence; `logprob` and `top` (ids and log-probabilities) only on request."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


#: The next tokens of a sequence: one or more, of which only the last can be an error.
Choices = list[TokenChoice | Exception]


class NonFiniteLogits(Exception):
    """The logits of a sequence are NaN or Inf, those of the model or after the changes that the request asks for."""


class Postponed(Exception):
    """The choice of a token waits for the grammar, which does not say yet which tokens may follow."""

    def __init__(self, logits: Logits) -> None:
        super().__init__("the grammar has not answered yet")
        self.logits = logits.copy()


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[TokenChoice | Exception]:
    # In numpy: synchronizing torch's threads takes longer than these few rows.
    await_grammars(states)
    rows: Logits = logits.numpy()
    best = rows.argmax(axis=-1).tolist()
    drawn = _draw_together(rows, best, states)
    choices: list[TokenChoice | Exception] = []
    for number, (row, token, state) in enumerate(zip(rows, best, states, strict=True)):
        try:
            choices.append(choose(row, state, token, drawn=drawn.get(number)))
        except Exception as error:  # of this sequence; the others continue
            choices.append(error)
    return choices


def _draw_together(rows: Logits, best: Sequence[int], states: Sequence[SamplingState]) -> dict[int, int]:
    """Return the tokens of those rows that are drawn from the distribution of the model itself."""
    uniforms: dict[int, float] = {}
    for number, (token, state) in enumerate(zip(best, states, strict=True)):
        if state.draws_from_all and math.isfinite(rows[number, token]):
            with suppress(Exception):  # `choose` draws this row alone, and raises it there
                uniforms[number] = state.uniform()
    if not uniforms:
        return {}
    plain = list(uniforms)
    drawn = draw_rows(
        rows if len(plain) == len(rows) else rows[plain],
        [rows[number, best[number]] for number in plain],
        [states[number].params.temperature for number in plain],
        list(uniforms.values()),
    )
    return dict(zip(plain, drawn, strict=True))


def choose(logits: Logits, state: SamplingState, best: int, ahead: int = 0, *, drawn: int | None = None) -> TokenChoice:
    if not math.isfinite(logits[best]):
        raise NonFiniteLogits(f"the model's logits are not finite (one is {logits[best]})")
    params, token = state.params, best
    if state.forced is not None:
        token = state.forced
    elif params.changes_logits or not params.is_greedy:
        try:
            changed = state.change(logits) if params.changes_logits else logits
        except GrammarPending:
            raise Postponed(logits) from None
        if params.changes_logits:
            token = int(changed.argmax())
            if changed[token] == -math.inf and params.forbidden:
                raise UsageError("forbidden: no other token may follow")
            if not math.isfinite(changed[token]):
                raise NonFiniteLogits(f"the largest logit after penalties, biases and grammar is {changed[token]}")
        if not params.is_greedy:
            token = state.draw(changed, ahead) if drawn is None else drawn
    if params.logprobs is None:
        return TokenChoice(token)
    shifted = logits.astype(np.float64) - logits[best]
    logprobs = shifted - np.log(np.exp(shifted).sum())
    top = np.argsort(-logprobs, kind="stable")[: params.logprobs]
    return TokenChoice(token, float(logprobs[token]), tuple(zip(top.tolist(), logprobs[top].tolist(), strict=True)))


def verify(logits: Tensor, states: Sequence[SamplingState], drafts: Sequence[Sequence[int]]) -> list[Choices]:
    """Choose the next tokens of each sequence: its drafts as long as the model chooses them too, and one more."""
    await_grammars(states)
    rows: Logits = logits.numpy()
    best = rows.argmax(axis=-1).tolist()
    first = 0
    chosen: list[Choices] = []
    for state, proposed in zip(states, drafts, strict=True):
        choices: Choices = []
        for ahead, draft in enumerate((*proposed, None)):
            try:
                choice = choose(rows[first + ahead], state, best[first + ahead], ahead)
            except Exception as error:  # of this sequence; the others continue
                choices.append(error)
                break
            choices.append(choice)
            if choice.token != draft:
                break
        first += len(proposed) + 1
        chosen.append(choices)
    return chosen
