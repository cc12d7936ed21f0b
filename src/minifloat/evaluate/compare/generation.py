"""Greedy continuations of the same prompts by two models, and the token at which they diverge.

They are reported, but are not part of the verdict: rounding can swap two tokens of nearly equal probability, and a
continuation that diverges there is no worse. The checkpoint's generation_config is not applied: two may differ in it.
"""

from __future__ import annotations

import inspect
import itertools
import math
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minifloat.checkpoint.progress import Progress
from minifloat.engine.text import Detokenizer
from minifloat.errors import NonFiniteError, UsageError
from minifloat.evaluate.compare.intervals import Estimate, fraction_interval, mean_interval
from minifloat.evaluate.compare.kv_cache import CacheFactory, check_takes_cache
from minifloat.evaluate.compare.models import Continuations, require_room
from minifloat.model.architecture.full_config import position_limit
from minifloat.model.runtime.tokenizer import end_tokens

#: Prompts in a batch. Constant, because kernels may sum in another order for another number of rows.
_BATCH = 16
_ACTIVITY = "generation"


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


@torch.inference_mode()
def generate_greedy(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    ends: Collection[int] | None = None,
    cache_factory: CacheFactory | None = None,
    progress: Progress | None = None,
) -> Continuations:
    """Continue prompts by the token with the largest logit; of equal logits, by the first token."""
    _check(model, prompts, new_tokens)
    stop = sorted(end_tokens(model.generation_config, model.config) if ends is None else ends)
    continuations: list[tuple[int, ...]] = []
    total = len(prompts) * new_tokens
    for first in range(0, len(prompts), _BATCH):
        rows = torch.tensor([list(prompt) for prompt in prompts[first : first + _BATCH]], device=model.device)
        cache = None if cache_factory is None else cache_factory()
        steps: list[Tensor] = []
        for tokens in _continue(model, rows, stop, cache, first):
            steps.append(tokens)
            if progress is not None:
                progress(first * new_tokens + len(rows) * len(steps), total, _ACTIVITY)
            if len(steps) == new_tokens:
                break
        continuations += [_cut(row, stop) for row in torch.stack(steps, dim=1).tolist()]
    if progress is not None:
        progress(total, total, _ACTIVITY)
    return tuple(continuations)


def greedy_divergence(
    tokenizer: PreTrainedTokenizerBase,
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
    mean = mean_interval(shares, np.ones_like(shares)).clipped(0, 1)
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


def _check(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    check_takes_cache(model)
    lengths = {len(prompt) for prompt in prompts}
    if len(lengths) != 1 or 0 in lengths or new_tokens < 1:
        raise UsageError(
            "expected prompts of one length, with at least one token, and at least one token to generate; got "
            f"{len(prompts)} prompts of {sorted(lengths)} tokens and {new_tokens} to generate"
        )
    require_room(max(lengths), new_tokens, position_limit(model.config))


def _continue(model: PreTrainedModel, ids: Tensor, stop: Sequence[int], cache: Any, first: int) -> Iterator[Tensor]:
    """Yield the next token of each row ``[B]``, step by step, until all rows have ended."""
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = 1
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    stops = torch.tensor(stop, dtype=torch.long, device=ids.device)
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for step in itertools.count():
        if "position_ids" in parameters:  # not all models count from the length of the cache
            options["position_ids"] = positions
        output: Any = model(input_ids=ids, past_key_values=cache, **options)
        cache = getattr(output, "past_key_values", cache)  # some models do not return their cache
        if cache is None:
            raise UsageError(f"{type(model).__name__} returns no KV cache, so it cannot generate text here")
        best, tokens = output.logits[:, -1].max(dim=-1)
        broken = ~(best.isfinite() | ended)
        if bool(broken.any()):
            prompt = first + int(broken.int().argmax())
            raise NonFiniteError("logits", f"NaN or Inf where token {step} after prompt {prompt} is chosen")
        yield tokens
        ended |= torch.isin(tokens, stops)
        if bool(ended.all()):
            return
        ids, positions = tokens[:, None], positions[:, -1:] + 1


def _cut(row: list[int], stop: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens up to and including the first end token."""
    end = next((index for index, token in enumerate(row) if token in stop), len(row))
    return tuple(row[: end + 1])


def _parted_at(baseline: Sequence[int], candidate: Sequence[int]) -> int | None:
    for index, (first, second) in enumerate(zip(baseline, candidate, strict=False)):
        if first != second:
            return index
    return None if len(baseline) == len(candidate) else min(len(baseline), len(candidate))


def _sample(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    baseline: Sequence[int],
    candidate: Sequence[int],
    parted_at: int | None,
) -> ContinuationPair:
    text = str(tokenizer.decode(list(prompt), skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return ContinuationPair(text, _text(tokenizer, prompt, baseline), _text(tokenizer, prompt, candidate), parted_at)


def _text(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], continuation: Sequence[int]) -> str:
    """Decode a continuation; a space at its start is kept, which tokenizers drop at the start of a text."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join(map(detokenizer.add, continuation)) + detokenizer.rest()
