"""The candidate with some of its modules the baseline's: how far is it from the baseline?

One operation answers every question of attribution. With all modules but one the baseline's, it is what exchanging that
module alone does; with one, what remains without it; with those of a suggestion, what the suggestion would give. Only
the candidate is changed, and only as long as a measurement takes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.compare.attribution.differences import Difference, exchanged
from minifloat.compare.metrics import Distribution, kl_divergence, same_choice
from minifloat.compare.models import Predictor
from minifloat.compare.verdict import Tolerance
from minifloat.runtime.linear import QuantizedWeight

#: Tokens of a batch of windows.
_BATCH_TOKENS = 2048
#: What may be held of the baseline's distributions, so that they are computed once.
_HELD_BYTES = 2**28


@dataclass(frozen=True)
class Distance:
    """How far a model is from the baseline, on a sample.

    Attributes:
        kl: Mean KL divergence in nats per token.
        ppl_increase: Perplexity over the baseline's, less 1.
        agreement: Fraction of tokens with the same first choice, ties apart.
    """

    kl: float
    ppl_increase: float
    agreement: float

    def within(self, tolerance: Tolerance) -> bool:
        """Whether the values, taken as exact, keep all bounds."""
        return (
            self.kl <= tolerance.max_kl
            and self.ppl_increase <= tolerance.max_ppl_increase
            and self.agreement >= tolerance.min_agreement
        )


class Mixtures:
    """Measures mixtures of two models on the same windows.

    Args:
        baseline: What the baseline says of the windows is computed once.
        candidate: Of the same architecture.
        windows: ``[B, W]`` token ids.

    Attributes:
        windows: How many.
        tokens: Scored tokens.
        batches: The windows as they are run.
    """

    def __init__(self, baseline: Predictor, candidate: Predictor, windows: Tensor) -> None:
        self._baseline, self._candidate = baseline, candidate
        self._runner = copy.copy(candidate)
        self._runner.weight_only = False  # or it would be that of the baseline's modules, too
        self.windows = len(windows)
        self.tokens = self.windows * (windows.shape[1] - 1)
        self.batches = torch.split(windows, max(_BATCH_TOKENS // windows.shape[1], 1))
        self._features = [_scored(baseline.features(ids)) for ids in self.batches]
        width = torch.float64.itemsize * 2  # of the two large tensors of a `Distribution`
        self._holds = self.tokens * baseline.vocab_size * width <= _HELD_BYTES
        self._distributions: dict[tuple[int, int], Distribution] = {}

    @property
    def feature_bytes(self) -> int:
        """Bytes that are held per window."""
        return sum(features.nbytes for features in self._features) // self.windows

    def measure(self, kept: Iterable[Difference], *, cache: bool = True) -> Distance:
        """The candidate with these differences undone.

        Args:
            kept: The differences in which it is to be as the baseline.
            cache: Let its keys and values pass through what the candidate's pass through, not the baseline's.
        """
        runner, kl, nll, agree = self._runner, 0.0, 0.0, 0.0
        runner.new_cache = self._candidate.new_cache if cache else self._baseline.new_cache
        with self._mixed(kept):
            for index, ids in enumerate(self.batches):
                features, targets = _scored(runner.features(ids)), ids[:, 1:].flatten()
                for rows, p in self._baseline_of(index, runner.head_rows()):
                    q = Distribution(runner.logits(features[rows]))
                    kl += float(kl_divergence(p, q).sum())
                    nll += float((q.nll(targets[rows]) - p.nll(targets[rows])).sum())
                    agree += float(same_choice(p, q).sum())
        return Distance(kl / self.tokens, _expm1(nll / self.tokens), agree / self.tokens)

    def keeps_quantized(self, kept: Iterable[Difference]) -> bool:
        """Whether a mixture has any quantized weight."""
        with self._mixed(kept):
            return any(isinstance(module, QuantizedWeight) for module in self._candidate.model.modules())

    @contextmanager
    def _mixed(self, kept: Iterable[Difference]) -> Iterator[None]:
        """Let every module be as its own model has it."""
        with (
            self._baseline.set_up(),
            self._candidate.set_up(),
            exchanged(self._candidate.model, self._baseline.model, kept),
        ):
            yield

    def _baseline_of(self, batch: int, step: int) -> Iterator[tuple[slice, Distribution]]:
        """What the baseline says of a batch, some rows at a time."""
        features = self._features[batch]
        for start in range(0, len(features), step):
            known = self._distributions.get((batch, start))
            p = known or Distribution(self._baseline.logits(features[start : start + step]))
            if self._holds:
                self._distributions[batch, start] = p
            yield slice(start, start + step), p


def spread(windows: Tensor, count: float) -> Tensor:
    """About so many windows of all, at least one, evenly spread among them."""
    whole = int(min(max(count, 1), len(windows)))
    return windows[torch.arange(whole) * len(windows) // whole]


def as_tensor(windows: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """Windows ``[B, W]``."""
    return windows if isinstance(windows, Tensor) else torch.tensor([list(window) for window in windows])


def _scored(features: Tensor) -> Tensor:
    """The rows that predict a token of the window: ``[B, W, ...]`` to ``[B (W - 1), ...]``."""
    return features[:, :-1].flatten(0, 1)


def _expm1(value: float) -> float:
    try:
        return math.expm1(value)
    except OverflowError:
        return math.inf
