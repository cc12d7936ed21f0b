"""The one internal form of how an answer is sampled: what the fields of every API are translated into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from minifloat.engine import Grammar, SamplingParams, Thinking
from minifloat.engine.sampling import MODEL_DEFAULTS
from minifloat.errors import UsageError

_SEEDS = 2**64
#: Log-probabilities of the tokens of all answers to a request, those of alternatives included, which are kept until
#: the last is written: about 30 MB.
MAX_LOGPROBS = 1 << 16


@dataclass(frozen=True)
class Sampling:
    """How the answers to a prompt are sampled. `SamplingParams` has the attributes that are not named here.

    Attributes:
        n: Answers to each prompt.
        temperature: None, here and in the next four: as the model's generation_config.json says.
        top_k: 0 or less: all tokens.
        must_fit: Whether a prompt that leaves no room for `max_tokens` is refused, and not answered in fewer.
        bad_words: Texts that the answer never has, neither with nor without a space before.
        returns_ids: Whether the answer has the tokens of prompts.
        cache_salt: Requests share cached prefixes only with their salt.
        priority: Of the requests that wait, those of the lowest are next.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    must_fit: bool = True
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    grammar: Grammar | None = None
    visible: frozenset[int] = frozenset()
    thinking: Thinking | None = None
    returns_ids: bool = False
    cache_salt: str = ""
    priority: int = 0

    def bounded(self, prompts: int) -> Sampling:
        """Return the form in which the answers to some prompts have at most `MAX_LOGPROBS` log-probabilities."""
        if self.logprobs is None:
            return self
        most = MAX_LOGPROBS // (prompts * self.n * (1 + self.logprobs))
        if self.must_fit and (self.max_tokens or 0) > most:
            raise UsageError(
                f"max_tokens: with {1 + self.logprobs} log-probabilities of each token, {prompts * self.n} answers may "
                f"have {most} tokens each, {MAX_LOGPROBS} numbers in all; ask for fewer tokens, answers or alternatives"
            )
        return replace(self, max_tokens=most if self.max_tokens is None else min(self.max_tokens, most))

    def params(
        self, defaults: Mapping[str, Any], encode: Callable[[str], Sequence[int]] = lambda text: ()
    ) -> list[SamplingParams]:
        """Return the engine's parameters of each answer, which differ in the seed.

        Args:
            defaults: Those of the model, by the names of `SamplingParams`.
            encode: Returns the tokens of a text, without special tokens.
        """
        values = dict(defaults)
        values |= {name: value for name in MODEL_DEFAULTS if (value := getattr(self, name)) is not None}
        values["top_k"] = max(values.get("top_k", 0), 0)
        values |= {name: getattr(self, name) for name in _PASSED_ON}
        values["forbidden"] = tuple(_token_sequences(self.bad_words, encode))
        if self.seed is None:
            return [SamplingParams(**values)] * self.n
        return [SamplingParams(**values, seed=(self.seed + index) % _SEEDS) for index in range(self.n)]


def _token_sequences(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of words at the beginning of a text and, where they differ, after a space."""
    for word in words:
        alone, spaced = (tuple(encode(text)) for text in (word.lstrip(), f" {word.lstrip()}"))
        if not alone:
            raise UsageError("bad_words: one of them has no tokens")
        yield alone
        if spaced[-len(alone) :] != alone:
            yield spaced


_PASSED_ON = {each.name for each in fields(Sampling)} & {each.name for each in fields(SamplingParams)} - {
    *MODEL_DEFAULTS,
    "seed",
}
