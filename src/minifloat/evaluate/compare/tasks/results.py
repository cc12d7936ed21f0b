"""The result of a run of tasks: scores as the harness reports them, and the results of all items.

Most scores are functions of a mean over items: the mean itself or, for likelihoods, a perplexity. This module lists
these functions, so that intervals can be computed from sums. A score counts as one of them only if computing it in this
way gives the harness' score.
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


#: Name of the harness' aggregation -> the same score as a function of the (weighted) mean of the items' results; for
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
        stderr: Standard error of the score; NaN if the harness gives none.
    """

    score: float
    stderr: float


@dataclass(frozen=True)
class MetricRun:
    """One metric of one task: the score, and the results of the items."""

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
    """A score that is the mean of the scores of several tasks."""

    group: str
    metric: str
    score: TaskScore
    members: tuple[str, ...]
    by_size: bool


@dataclass(frozen=True)
class TaskRun:
    """The result of `run_tasks`."""

    tasks: tuple[str, ...]
    harness: str
    metrics: tuple[MetricRun, ...]
    groups: tuple[GroupRun, ...]


def mean(values: Sequence[float]) -> float:
    """Return the mean, which the harness computes where a task names no aggregation."""
    return sum(values) / len(values)


def aggregation_name(aggregate: Callable[[Sequence[Any]], float], values: Sequence[Any], score: float) -> str:
    """Return the key of `OF_MEANS` that computes the score from the results, or ``"other"``.

    The name of the aggregation function is trusted only if computing the score by that key gives `score` again.
    """
    name = getattr(aggregate, "__name__", "")
    try:
        sums, sizes = parts(name, values)
        recomputed = OF_MEANS[name](float(sums.sum() / sizes.sum()))
    except (KeyError, TypeError, ValueError):
        return "other"
    return name if math.isclose(recomputed, score, rel_tol=1e-9, abs_tol=1e-12) else "other"


def parts(aggregation: str, values: Sequence[Any]) -> tuple[FloatArray, FloatArray]:
    """Return the sums ``[N]`` and sizes ``[N]`` of items; the score is a function of ``sum(sums) / sum(sizes)``."""
    numbers = np.asarray(values, np.float64).reshape(len(values), 2 if aggregation in _WEIGHTED else 1)
    sums = -numbers[:, 0] if aggregation in (*PERPLEXITIES, *_WEIGHTED) else numbers[:, 0]
    return sums, numbers[:, 1] if aggregation in _WEIGHTED else np.ones(len(values))
