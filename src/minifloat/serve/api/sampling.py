"""The one internal form of how an answer is sampled: what the fields of every API are translated into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from minifloat.engine import Grammar, SamplingParams, Thinking
from minifloat.engine.sampling import MODEL_DEFAULTS

_SEEDS = 2**64


@dataclass(frozen=True)
class Sampling:
    """How the answers to a prompt are sampled. `SamplingParams` has the attributes that are not named here.

    Attributes:
        n: Answers to each prompt.
        temperature: None, here and in the next four: as the model's generation_config.json says.
        top_k: 0 or less: all tokens.
        must_fit: Whether a prompt that leaves no room for `max_tokens` is refused, and not answered in fewer.
        cache_salt: Requests share cached prefixes only with their salt.
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
    grammar: Grammar | None = None
    visible: frozenset[int] = frozenset()
    thinking: Thinking | None = None
    cache_salt: str = ""

    def params(self, defaults: Mapping[str, Any]) -> list[SamplingParams]:
        """Return the engine's parameters of each answer, which differ in the seed.

        Args:
            defaults: Those of the model, by the names of `SamplingParams`.

        Raises:
            UsageError: If a value is out of range.
        """
        values = dict(defaults)
        values |= {name: value for name in MODEL_DEFAULTS if (value := getattr(self, name)) is not None}
        values["top_k"] = max(values.get("top_k", 0), 0)
        values |= {name: getattr(self, name) for name in _PASSED_ON}
        if self.seed is None:
            return [SamplingParams(**values)] * self.n
        return [SamplingParams(**values, seed=(self.seed + index) % _SEEDS) for index in range(self.n)]


_PASSED_ON = {each.name for each in fields(Sampling)} & {each.name for each in fields(SamplingParams)} - {
    *MODEL_DEFAULTS,
    "seed",
}
