"""Time several implementations of one product side by side.

A round takes one sample of each contender in turn, so that other load on the machine affects all alike; ratios are
taken inside rounds, and the median ratio is reported. A sample is a run of calls on distinct weights, and the next
sample continues with the following weights. A contender's weights are together far larger than the caches, so that
every call reads its weight from memory.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Smallest number of rounds in which a slow contender is measured.
FEWEST_ROUNDS = 3


@dataclass
class Contender:
    """An implementation of a product, and its weights.

    Attributes:
        name: The name in tables.
        multiply: ``multiply(x, weight)``.
        weights: Weights in the form that `multiply` takes, each in memory of its own.
        nbytes: Bytes of one weight with its scales, which a call has to read.
        dtype: The dtype of the input.
        next: Index of the weight of the next call.
    """

    name: str
    multiply: Callable[[Tensor, Any], object]
    weights: Sequence[Any]
    nbytes: int
    dtype: torch.dtype = torch.bfloat16
    next: int = 0

    def sample(self, x: Tensor, calls: int) -> float:
        """Return the seconds per call over the next `calls` weights."""
        count, multiply = len(self.weights), self.multiply
        weights = [self.weights[(self.next + i) % count] for i in range(calls)]
        self.next = (self.next + calls) % count
        start = time.perf_counter()
        for weight in weights:
            multiply(x, weight)
        return (time.perf_counter() - start) / calls


def measure(contenders: Sequence[Contender], m: int, k: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return the seconds per call of every contender with an input ``[m, k]``, one sample per round.

    Args:
        contenders: The implementations to compare.
        m: Rows of the input.
        k: Columns of the input.
        rounds: Number of samples of each; a contender whose single call takes longer than `seconds` gets fewer.
        seconds: Approximate time of a sample; no sample uses a weight twice.
    """
    inputs = {c.dtype: torch.randn(m, k).to(c.dtype) for c in contenders}
    plans: dict[str, tuple[int, int]] = {}
    for contender in contenders:
        contender.sample(inputs[contender.dtype], 1)
        call_seconds = contender.sample(inputs[contender.dtype], 1)
        calls = min(len(contender.weights), max(1, math.ceil(seconds / call_seconds)))
        plans[contender.name] = calls, min(rounds, max(FEWEST_ROUNDS, int(rounds * seconds / call_seconds)))
    samples: dict[str, list[float]] = {c.name: [] for c in contenders}
    for number in range(rounds):
        for contender in contenders:
            calls, num_rounds = plans[contender.name]
            if number < num_rounds:
                samples[contender.name].append(contender.sample(inputs[contender.dtype], calls))
    return samples


def ratio(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    """Return the speed of the candidate relative to the baseline: the median over the rounds that measured both."""
    return statistics.median(b / c for b, c in zip(baseline, candidate, strict=False))


def spread(samples: Sequence[float]) -> float:
    """Return the interquartile range over the median; of fewer than four samples, the full range over the median."""
    if len(samples) < 4:
        return (max(samples) - min(samples)) / statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / statistics.median(samples)
