"""What a run of tasks leaves behind: scores as the harness reports them, and the results of all items.

Most scores are functions of a mean over items: the mean itself, or for likelihoods a perplexity. Those are known here,
so that intervals need no other code than sums; whether a score is one is checked by computing it anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def _identity(mean: float) -> float:
    return mean


def _exponential(mean: float) -> float:
    return math.exp(mean) if mean < math.log(np.finfo(np.float64).max) else math.inf


def _bits(mean: float) -> float:
    return mean / math.log(2)


#: How the harness makes a score of items' results -> the function of their (weighted) mean that it is; for the
#: likelihoods, of the mean negative log-likelihood.
OF_MEANS: dict[str, Callable[[float], float]] = {
    "mean": _identity,
    "perplexity": _exponential,
    "weighted_perplexity": _exponential,
    "bits_per_byte": _bits,
}
PERPLEXITIES = ("perplexity", "weighted_perplexity")
_WEIGHTED = ("weighted_perplexity", "bits_per_byte")


@dataclass(frozen=True)
class TaskScore:
    """A score as the harness reports it.

    Attributes:
        score: In the metric's own unit.
        stderr: Its standard error; NaN where the harness has none.
    """

    score: float
    stderr: float


@dataclass(frozen=True)
class MetricRun:
    """One metric of one task: the score, and what it was made of.

    Attributes:
        task: Its name.
        metric: ``"acc"``; with the filter where the task has one: ``"exact_match,strict-match"``.
        higher_is_better: What the task says of the metric.
        fewshot: Examples in each prompt.
        score: Of all items.
        items: What tells an item from others: its number and the hashes of its document, prompt and target.
        results: Of each item: a number, or what the metric makes its score of.
        aggregation: A key of `OF_MEANS`, or ``"other"``.
        aggregate: Makes a score of results.
    """

    task: str
    metric: str
    higher_is_better: bool
    fewshot: int
    score: TaskScore
    items: tuple[str, ...]
    results: tuple[Any, ...]
    aggregation: str
    aggregate: Callable[[Sequence[Any]], float]


@dataclass(frozen=True)
class GroupRun:
    """A score that is the mean of those of several tasks.

    Attributes:
        group: Its name.
        metric: As in `MetricRun`.
        score: As the harness reports it.
        members: The tasks.
        by_size: Whether each counts with its number of items.
    """

    group: str
    metric: str
    score: TaskScore
    members: tuple[str, ...]
    by_size: bool


@dataclass(frozen=True)
class TaskRun:
    """What `run_tasks` returns.

    Attributes:
        tasks: As they were asked for.
        harness: Version of lm-eval.
        metrics: One entry per task, metric and filter.
        groups: One entry per group that has a score, metric and filter.
    """

    tasks: tuple[str, ...]
    harness: str
    metrics: tuple[MetricRun, ...]
    groups: tuple[GroupRun, ...]


def mean(values: Sequence[float]) -> float:
    """What the harness takes where a task names no aggregation."""
    return sum(values) / len(values)


def aggregation_name(aggregate: Callable[[Sequence[Any]], float], values: Sequence[Any], score: float) -> str:
    """How a score is made of the results: by its function's name, believed only if that gives this score again."""
    name = getattr(aggregate, "__name__", "")
    try:
        sums, sizes = parts(name, values)
        again = OF_MEANS[name](float(sums.sum() / sizes.sum()))
    except (KeyError, TypeError, ValueError):
        return "other"
    return name if math.isclose(again, score, rel_tol=1e-9, abs_tol=1e-12) else "other"


def parts(aggregation: str, values: Sequence[Any]) -> tuple[FloatArray, FloatArray]:
    """Sums and sizes ``[N]`` of items; the score is a function of the sums' mean per size.

    Args:
        aggregation: A key of `OF_MEANS`.
        values: Results: numbers, log-likelihoods in nats, or those with the words or bytes of the document.

    Raises:
        TypeError: The results are none of these.
        ValueError: Likewise.
    """
    numbers = np.asarray(values, np.float64).reshape(len(values), 2 if aggregation in _WEIGHTED else 1)
    sums = -numbers[:, 0] if aggregation in (*PERPLEXITIES, *_WEIGHTED) else numbers[:, 0]
    return sums, numbers[:, 1] if aggregation in _WEIGHTED else np.ones(len(values))
