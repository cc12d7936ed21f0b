"""Times several ways of doing one thing, side by side.

A round takes one sample of each, in turn, so that whatever else happens on the machine happens to all; ratios are taken
inside rounds and their median counts. A sample is a run of calls on weights of their own, and the next sample goes on
where it stopped: the weights of each, together far larger than the caches, come from memory every time.
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

#: Of slow contenders: rounds that they take part in at least.
FEWEST_ROUNDS = 3


@dataclass
class Contender:
    """One way to multiply.

    Attributes:
        name: Its name in tables.
        multiply: ``multiply(x, weight)``.
        weights: What `multiply` takes, each in memory of its own.
        nbytes: Bytes of one weight, with its scales: what a call has to read.
        dtype: Of the input that it takes.
        next: The weight that the next call takes.
    """

    name: str
    multiply: Callable[[Tensor, Any], object]
    weights: Sequence[Any]
    nbytes: int
    dtype: torch.dtype = torch.bfloat16
    next: int = 0

    def sample(self, x: Tensor, calls: int) -> float:
        """Seconds per call, over the next `calls` weights."""
        count, multiply = len(self.weights), self.multiply
        weights = [self.weights[(self.next + i) % count] for i in range(calls)]
        self.next = (self.next + calls) % count
        start = time.perf_counter()
        for weight in weights:
            multiply(x, weight)
        return (time.perf_counter() - start) / calls


def measure(contenders: Sequence[Contender], m: int, k: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds per call of every contender with an input ``[m, k]``, one sample per round.

    Args:
        contenders: What to compare.
        m: Rows of the input.
        k: Columns of the input.
        rounds: Samples of each; a contender whose single call takes longer than `seconds` gets fewer.
        seconds: About how long a sample may take; no sample runs over a weight twice.
    """
    inputs = {c.dtype: torch.randn(m, k).to(c.dtype) for c in contenders}
    plans: dict[str, tuple[int, int]] = {}
    for contender in contenders:
        contender.sample(inputs[contender.dtype], 1)
        once = contender.sample(inputs[contender.dtype], 1)
        calls = min(len(contender.weights), max(1, math.ceil(seconds / once)))
        plans[contender.name] = calls, min(rounds, max(FEWEST_ROUNDS, int(rounds * seconds / once)))
    samples: dict[str, list[float]] = {c.name: [] for c in contenders}
    for number in range(rounds):
        for contender in contenders:
            calls, most = plans[contender.name]
            if number < most:
                samples[contender.name].append(contender.sample(inputs[contender.dtype], calls))
    return samples


def ratio(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    """How many times faster the candidate is: the median over the rounds that both took part in."""
    return statistics.median(b / c for b, c in zip(baseline, candidate, strict=False))


def spread(samples: Sequence[float]) -> float:
    """The distance between the quartiles, over the median; of fewer than four samples, between the extremes."""
    if len(samples) < 4:
        return (max(samples) - min(samples)) / statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / statistics.median(samples)
