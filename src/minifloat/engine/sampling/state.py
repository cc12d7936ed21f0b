"""`SamplingState`: what the choice of a sequence's next token depends on beside the logits."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from minifloat.engine.sampling.draw import Logits, Weights, draw, race
from minifloat.engine.sampling.params import SEED_BITS, SamplingParams

if TYPE_CHECKING:
    from minifloat.engine.grammar import GrammarState

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
        self._counts: dict[int, int] = {}
        self._seen = dict.fromkeys(prompt) if params.repetition_penalty != 1.0 else {}
        self._counts_tokens = bool(params.presence_penalty or params.frequency_penalty)
        self._uniform, self._first_uniform = _NONE, 0
        self._times: dict[int, Weights] = {}
        self.length = 0

    def add(self, token: int) -> None:
        """Record a token of the output."""
        self.length += 1
        if not self.params.changes_logits:
            return
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
        if self.grammar is not None:
            self.grammar.forbid(logits)
        if self.length < params.min_tokens:
            ends = logits[self._end]
            logits[self._end] = -np.inf
            if self.grammar is not None and not np.isfinite(logits.max()):  # the grammar allows only the end
                logits[self._end] = ends
        return logits

    def uniform(self, ahead: int = 0) -> float:
        """Return the number in [0, 1) that a token is drawn with: the first of Philox's block at its position.

        The numbers of several positions are generated at a time, because making a generator takes longer than they do.
        """
        position = self.length + ahead
        index = position - self._first_uniform
        if not 0 <= index < len(self._uniform):
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
