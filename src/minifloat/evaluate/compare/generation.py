"""Greedy continuations of the same prompts by two models, and the token at which they diverge.

They are reported, but are not part of the verdict: rounding can swap two tokens of nearly equal probability, and a
continuation that diverges there is no worse. The checkpoint's generation_config is not applied: two may differ in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minifloat.engine.text import Detokenizer
from minifloat.errors import UsageError
from minifloat.evaluate.compare.intervals import Estimate, fraction_interval, proportion_interval

if TYPE_CHECKING:
    from minifloat.model.runtime.tokenizer import TextTokenizer


@dataclass(frozen=True)
class ContinuationPair:
    prompt: str
    baseline: str
    candidate: str
    parted_at: int | None


@dataclass(frozen=True)
class GreedyDivergence:
    prompts: int
    new_tokens: int
    parted: int
    first_difference: tuple[int | None, ...]
    median: float | None
    identical_fraction: Estimate
    mean_prefix_match: Estimate
    samples: tuple[ContinuationPair, ...]


def greedy_divergence(
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    baseline: Sequence[Sequence[int]],
    candidate: Sequence[Sequence[int]],
    new_tokens: int,
) -> GreedyDivergence:
    if not prompts or not len(prompts) == len(baseline) == len(candidate):
        raise UsageError(
            f"expected a continuation by each model for each prompt, got {len(prompts)} prompts, {len(baseline)} and "
            f"{len(candidate)} continuations"
        )
    parted = tuple(_parted_at(*pair) for pair in zip(baseline, candidate, strict=True))
    places = [math.inf if place is None else place for place in parted]
    middle = statistics.median(places)
    order = sorted(range(len(places)), key=places.__getitem__)
    identical = fraction_interval(parted.count(None), len(parted))
    shares = np.minimum(np.array(places) / new_tokens, 1)
    mean = proportion_interval(shares, np.ones_like(shares))
    return GreedyDivergence(
        prompts=len(prompts),
        new_tokens=new_tokens,
        parted=len(parted) - parted.count(None),
        first_difference=parted,
        median=None if middle == math.inf else float(middle),
        identical_fraction=identical,
        mean_prefix_match=identical if set(parted) == {None} else mean,
        samples=tuple(
            _sample(tokenizer, prompts[index], baseline[index], candidate[index], parted[index])
            for index in dict.fromkeys((order[0], order[len(order) // 2], order[-1]))
        ),
    )


def _parted_at(baseline: Sequence[int], candidate: Sequence[int]) -> int | None:
    for index, (first, second) in enumerate(zip(baseline, candidate, strict=False)):
        if first != second:
            return index
    return None if len(baseline) == len(candidate) else min(len(baseline), len(candidate))


def _sample(
    tokenizer: TextTokenizer,
    prompt: Sequence[int],
    baseline: Sequence[int],
    candidate: Sequence[int],
    parted_at: int | None,
) -> ContinuationPair:
    text = str(tokenizer.decode(list(prompt), skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return ContinuationPair(text, _text(tokenizer, prompt, baseline), _text(tokenizer, prompt, candidate), parted_at)


def _text(tokenizer: TextTokenizer, prompt: Sequence[int], continuation: Sequence[int]) -> str:
    """Decode a continuation; a space at its start is kept, which tokenizers drop at the start of a text."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join(map(detokenizer.add, continuation)) + detokenizer.rest()
