"""Distance from the baseline of mixtures: the candidate with some of its modules replaced by the baseline's.

Every measurement of attribution is one of a mixture. With all modules but one from the baseline, it is the damage of
this module alone; with one module from the baseline, the damage of all others; with the modules of a suggestion, the
effect of the suggestion. Only the candidate is changed, and only while a measurement runs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.evaluate.compare.attribution.differences import Difference, exchanged, is_stored_quantized
from minifloat.evaluate.compare.metrics import Distribution, kl_divergence
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.transformers_model import TransformersModel

#: Tokens in a batch of windows.
_BATCH_TOKENS = 2048
#: Memory for the baseline's distributions. If they fit, they are computed only once.
_HELD_BYTES = 2**28


@dataclass(frozen=True)
class Distance:
    """Distance of a model from the baseline, on a sample.

    Attributes:
        kl: Mean KL divergence in nats per token.
    """

    kl: float
    ppl_increase: float
    same_top1: float

    def within(self, tolerance: Tolerance) -> bool:
        """Return whether the values, without intervals, keep all bounds."""
        return (
            self.kl <= tolerance.max_kl
            and self.ppl_increase <= tolerance.max_ppl_increase
            and self.same_top1 >= tolerance.min_same_top1
        )


class Mixtures:
    """Measures mixtures of two models on the same windows."""

    def __init__(self, baseline: TransformersModel, candidate: TransformersModel, windows: Tensor) -> None:
        self._baseline, self._candidate = baseline, candidate
        self._runner = copy.copy(candidate)
        self._runner.weight_only = False  # it would also apply to the baseline's modules
        self.windows = len(windows)
        self.tokens = self.windows * (windows.shape[1] - 1)
        self.batches = torch.split(windows, max(_BATCH_TOKENS // windows.shape[1], 1))
        self._logits = [list(baseline.logits(ids)) for ids in self.batches]
        width = torch.float64.itemsize * 2  # a `Distribution` has two large tensors
        self._hold_distributions = self.tokens * baseline.vocab_size * width <= _HELD_BYTES
        self._distributions: dict[tuple[int, int], Distribution] = {}

    @property
    def window_bytes(self) -> int:
        """Bytes per window of the baseline's logits, which are held."""
        return sum(logits.nbytes for of_batch in self._logits for logits in of_batch) // self.windows

    def measure(self, kept: Iterable[Difference], *, cache: bool = True) -> Distance:
        """Measure the candidate with some of the baseline's modules."""
        runner, kl, nll, agree = self._runner, 0.0, 0.0, 0.0
        runner.new_cache = self._candidate.new_cache if cache else self._baseline.new_cache
        with self._mixed(kept):
            for index, ids in enumerate(self.batches):
                start, targets = 0, ids[:, 1:].flatten()
                for p, logits in zip(self._baseline_of(index), runner.logits(ids), strict=True):
                    q, of_text = Distribution(logits), targets[start : start + len(logits)]
                    kl += float(kl_divergence(p, q).sum())
                    nll += float((q.nll(of_text) - p.nll(of_text)).sum())
                    agree += float((p.top[:, 0] == q.top[:, 0]).sum())
                    start += len(logits)
        return Distance(kl / self.tokens, _expm1(nll / self.tokens), agree / self.tokens)

    def keeps_quantized(self, kept: Iterable[Difference]) -> bool:
        """Return whether a mixture still has a weight that its checkpoint stores quantized."""
        with self._mixed(kept):
            return any(map(is_stored_quantized, self._candidate.model.modules()))

    @contextmanager
    def mixture(self, kept: Iterable[Difference]) -> Iterator[TransformersModel]:
        """Give the candidate with some of the baseline's modules while the context lasts."""
        self._runner.new_cache = self._candidate.new_cache
        with self._mixed(kept):
            yield self._runner

    @contextmanager
    def _mixed(self, kept: Iterable[Difference]) -> Iterator[None]:
        """Mix the models; each module quantizes its inputs or not as in the predictor that it comes from."""
        with (
            self._baseline.set_up(),
            self._candidate.set_up(),
            exchanged(self._candidate.model, self._baseline.model, kept),
        ):
            yield

    def _baseline_of(self, batch: int) -> Iterator[Distribution]:
        """Yield the baseline's distributions of a batch, some rows at a time."""
        for step, logits in enumerate(self._logits[batch]):
            p = self._distributions.get((batch, step)) or Distribution(logits)
            if self._hold_distributions:
                self._distributions[batch, step] = p
            yield p


def spread(windows: Tensor, count: float) -> Tensor:
    """Return about `count` windows, at least one, spread evenly over all windows."""
    whole = int(min(max(count, 1), len(windows)))
    return windows[torch.arange(whole) * len(windows) // whole]


def as_tensor(windows: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """Return windows of token ids as a tensor ``[B, W]``."""
    return windows if isinstance(windows, Tensor) else torch.tensor([list(window) for window in windows])


def _expm1(value: float) -> float:
    try:
        return math.expm1(value)
    except OverflowError:
        return math.inf
