"""How long two models, both always taking the most probable token, write the same text.

Scores measure every prediction on a given text; here a model reads what it has written itself, so one token that
differs sends it another way. That is what a user sees, and it is harsh: two tokens that are all but equally probable
swap at any rounding, and texts that part are not worse for it. It is a description, not a verdict.

The loop is our own and takes the largest logit: transformers' `generate` adds what a checkpoint's generation_config
says (repetition penalties, forced or suppressed tokens, sampling), and two checkpoints may say different things.
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

from minifloat.compare.intervals import CONFIDENCE, Estimate, mean_interval
from minifloat.compare.kv_cache import CacheFactory, check_takes_cache
from minifloat.errors import NonFiniteError, UsageError
from minifloat.report.progress import Progress
from minifloat.serve.detokenize import Detokenizer

#: Prompts that run together. Constant, as kernels may sum in another order for another number of rows.
_BATCH = 16
_WHAT = "generation"

#: Token ids by prompt; one that ended has its end token last.
Continuations = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ContinuationPair:
    """Both continuations of one prompt.

    Attributes:
        prompt: Text, without special tokens.
        baseline: The continuation by the baseline.
        candidate: The continuation by the candidate.
        parted_at: Index of the first token of the continuation that differs; None: there is none.
    """

    prompt: str
    baseline: str
    candidate: str
    parted_at: int | None


@dataclass(frozen=True)
class GreedyDivergence:
    """When two models' greedy continuations of the same prompts part.

    Attributes:
        prompts: How many.
        new_tokens: Tokens of a continuation, at most.
        parted: Prompts whose continuations differ.
        first_difference: Of each prompt, the index of the first token of the continuation that differs, or None.
        median: Of `first_difference`; None where at least half of the prompts never parted.
        identical_fraction: Share of prompts whose continuations are the same to the end.
        mean_prefix_match: Mean of the share of `new_tokens` before the first difference; 1 where there is none.
        samples: Prompts that parted earliest, in the middle, and latest or never.
    """

    prompts: int
    new_tokens: int
    parted: int
    first_difference: tuple[int | None, ...]
    median: float | None
    identical_fraction: Estimate
    mean_prefix_match: Estimate
    samples: tuple[ContinuationPair, ...]


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end a text, by generation_config.json, else by config.json; maybe none."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True)):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()


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
    """Continue prompts by the token with the largest logit, the first of equals.

    Args:
        model: In eval mode. Nothing in its generation_config but the end tokens has an effect.
        prompts: Token ids, the same number in each.
        new_tokens: Tokens to make at most.
        ends: Tokens that end a text; by default `end_tokens` of the model. Two models that are compared need the same.
        cache_factory: Makes the cache of each batch, as `minifloat.compare.kv_cache.kv_cache_factory` does; by default
            the model makes its own.
        progress: Called after each token of a batch.

    Returns:
        The new tokens of each prompt: `new_tokens`, or fewer, of which the last is an end token.

    Raises:
        UsageError: The prompts differ in length, do not fit the model, or it takes no KV cache.
        NonFiniteError: A model's largest logit is NaN or Inf; says where first.
    """
    _check(model, prompts, new_tokens)
    stop = sorted(end_tokens(model) if ends is None else ends)
    made: list[tuple[int, ...]] = []
    total = len(prompts) * new_tokens
    for first in range(0, len(prompts), _BATCH):
        rows = torch.tensor([list(prompt) for prompt in prompts[first : first + _BATCH]], device=model.device)
        cache = None if cache_factory is None else cache_factory()
        steps: list[Tensor] = []
        for tokens in _continue(model, rows, stop, cache, first):
            steps.append(tokens)
            if progress is not None:
                progress(first * new_tokens + len(rows) * len(steps), total, _WHAT)
            if len(steps) == new_tokens:
                break
        made += [_cut(row, stop) for row in torch.stack(steps, dim=1).tolist()]
    if progress is not None:
        progress(total, total, _WHAT)
    return tuple(made)


def greedy_divergence(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    baseline: Sequence[Sequence[int]],
    candidate: Sequence[Sequence[int]],
    new_tokens: int,
) -> GreedyDivergence:
    """Compare continuations of the same prompts.

    A text that ended while the other went on parts from it there. The intervals take the prompts for a random sample
    of prompts: Wilson's for the fraction, and for the mean a bootstrap over prompts. Where nothing parted, the
    bootstrap has nothing to draw from and the mean takes the fraction's interval, below which it cannot be.

    Args:
        tokenizer: Of both models; for the samples.
        prompts: Token ids.
        baseline: What `generate_greedy` made of them with the baseline.
        candidate: The same with the candidate, and the same end tokens.
        new_tokens: As it was given there.

    Raises:
        UsageError: Not as many continuations as prompts, or no prompt.
    """
    if not prompts or not len(prompts) == len(baseline) == len(candidate):
        raise UsageError(
            f"expected a continuation by each model for each prompt, got {len(prompts)} prompts, {len(baseline)} and "
            f"{len(candidate)} continuations"
        )
    parted = tuple(_parted_at(one, other) for one, other in zip(baseline, candidate, strict=True))
    places = [math.inf if place is None else place for place in parted]
    middle = statistics.median(places)
    order = sorted(range(len(places)), key=places.__getitem__)
    identical = _fraction(parted.count(None), len(parted))
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
            "expected prompts of one length, with at least one token, and at least one token to make; got "
            f"{len(prompts)} prompts of {sorted(lengths)} tokens and {new_tokens} to make"
        )
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < max(lengths) + new_tokens:
        raise UsageError(f"{max(lengths)} tokens of a prompt and {new_tokens} new ones; the model attends to {limit}")


def _continue(model: PreTrainedModel, ids: Tensor, stop: Sequence[int], cache: Any, first: int) -> Iterator[Tensor]:
    """The next token of each row ``[B]``, again and again until all rows have ended.

    Rows that have ended stay in: what the others compute does not depend on when that was.
    """
    taken = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in taken:
        options["logits_to_keep"] = 1
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    stops = torch.tensor(stop, dtype=torch.long, device=ids.device)
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for step in itertools.count():
        if "position_ids" in taken:  # not all models count from the length of the cache
            options["position_ids"] = positions
        output: Any = model(input_ids=ids, past_key_values=cache, **options)
        cache = getattr(output, "past_key_values", cache)  # some do not return the one that they were given
        if cache is None:
            raise UsageError(f"{type(model).__name__} gives no KV cache back: it cannot be generated with")
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
    """Up to the first end token, with it."""
    end = next((index for index, token in enumerate(row) if token in stop), len(row))
    return tuple(row[: end + 1])


def _parted_at(baseline: Sequence[int], candidate: Sequence[int]) -> int | None:
    for index, (one, other) in enumerate(zip(baseline, candidate, strict=False)):
        if one != other:
            return index
    return None if len(baseline) == len(candidate) else min(len(baseline), len(candidate))


def _fraction(count: int, total: int) -> Estimate:
    """With Wilson's interval."""
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, spread = count / total, z * z / total
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    return Estimate(share, max(middle - half, 0.0), min(middle + half, 1.0))


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
    """With the space that it may begin with, which tokenizers drop at the start of a text."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join(map(detokenizer.add, continuation)) + detokenizer.rest()
