"""Two runs of the same tasks, item by item.

The interval of a difference is that of a paired bootstrap over items (`minifloat.compare.intervals`).

Source: Q. McNemar, Note on the sampling error of the difference between correlated proportions or percentages,
Psychometrika 12 (1947).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minifloat.compare.intervals import CONFIDENCE, FEWEST_UNITS, Estimate, paired_mean_interval
from minifloat.compare.tasks.results import (
    OF_MEANS,
    PERPLEXITIES,
    GroupRun,
    MetricRun,
    TaskRun,
    TaskScore,
    parts,
)
from minifloat.errors import UsageError

#: For scores that are no function of a mean: every draw scores all items anew.
_SLOW_DRAWS = 1000
_SEED = 0
_LARGEST_EXPONENT = math.log(np.finfo(np.float64).max)


@dataclass(frozen=True)
class TaskDifference:
    """A task's score under both models.

    Attributes:
        task: Name of the task or group.
        metric: ``"acc"``; with the filter where the task has one: ``"exact_match,strict-match"``.
        items: Items that both models answered.
        baseline: The baseline's score.
        candidate: The candidate's.
        difference: Candidate - baseline, with the interval of a paired bootstrap over items; no interval below
            `minifloat.compare.intervals.FEWEST_UNITS` items, one without width where no item differs. A perplexity's
            is that of the ratio of the two.
        recovery: Percent of the baseline's score that is kept: candidate / baseline, or baseline / candidate where
            less is better; NaN where that is no number.
        wins: Items on which only the candidate is right, or is better where items are not right or wrong.
        losses: Items on which only the baseline is right, or is better.
        mcnemar_p: Probability of wins and losses as uneven as these where both are equally likely, exact, two-sided;
            None where items are not right or wrong.
        higher_is_better: Whether a loss of quality lowers the score.
        fewshot: Examples in each prompt; of a group the most.
        members: The tasks of a group; none for a task.
    """

    task: str
    metric: str
    items: int
    baseline: TaskScore
    candidate: TaskScore
    difference: Estimate
    recovery: float
    wins: int
    losses: int
    mcnemar_p: float | None
    higher_is_better: bool
    fewshot: int
    members: tuple[str, ...] = ()


def compare_tasks(baseline: TaskRun, candidate: TaskRun) -> tuple[TaskDifference, ...]:
    """Compare two runs item by item; groups come first.

    Raises:
        UsageError: The runs are not of the same tasks, metrics and items.
    """
    firsts, seconds = ({(run.task, run.metric): run for run in side.metrics} for side in (baseline, candidate))
    others = {(run.group, run.metric): run for run in candidate.groups}
    if firsts.keys() != seconds.keys() or {(run.group, run.metric) for run in baseline.groups} != others.keys():
        raise UsageError(f"runs of different tasks: {', '.join(baseline.tasks)} and {', '.join(candidate.tasks)}")
    for key, run in firsts.items():
        _refuse_other_items(run, seconds[key])
    groups = [
        _group_difference(
            run,
            others[run.group, run.metric],
            [(firsts[task, run.metric], seconds[task, run.metric]) for task in run.members],
        )
        for run in baseline.groups
    ]
    return (*groups, *(_difference(run, seconds[key]) for key, run in firsts.items()))


def _refuse_other_items(first: MetricRun, second: MetricRun) -> None:
    if first.items == second.items:
        return
    if len(first.items) != len(second.items):
        found = f"{len(first.items)} and {len(second.items)}"
    else:
        differing = next(a for a, b in zip(first.items, second.items, strict=True) if a != b)
        found = f"the first that differs is item {differing.partition('/')[0]}"
    raise UsageError(
        f"task {first.task}, {first.metric}: the two runs have other items or prompts ({found}); run both with the "
        "same data, limit and examples"
    )


def _difference(first: MetricRun, second: MetricRun) -> TaskDifference:
    wins, losses, right_or_wrong = _wins_and_losses(first, second)
    return TaskDifference(
        task=first.task,
        metric=first.metric,
        items=len(first.items),
        baseline=first.score,
        candidate=second.score,
        difference=_interval(first, second),
        recovery=_recovery(first.score.score, second.score.score, first.higher_is_better),
        wins=wins,
        losses=losses,
        mcnemar_p=mcnemar(wins, losses) if right_or_wrong else None,
        higher_is_better=first.higher_is_better,
        fewshot=first.fewshot,
    )


def _group_difference(
    first: GroupRun, second: GroupRun, members: Sequence[tuple[MetricRun, MetricRun]]
) -> TaskDifference:
    counts = [_wins_and_losses(*pair) for pair in members]
    wins, losses = sum(count[0] for count in counts), sum(count[1] for count in counts)
    higher = all(run.higher_is_better for run, _ in members)
    return TaskDifference(
        task=first.group,
        metric=first.metric,
        items=sum(len(run.items) for run, _ in members),
        baseline=first.score,
        candidate=second.score,
        difference=_group_interval(first, second, members),
        recovery=_recovery(first.score.score, second.score.score, higher),
        wins=wins,
        losses=losses,
        mcnemar_p=mcnemar(wins, losses) if all(count[2] for count in counts) else None,
        higher_is_better=higher,
        fewshot=max((run.fewshot for run, _ in members), default=0),
        members=first.members,
    )


def mcnemar(wins: int, losses: int) -> float:
    """Two-sided p-value of McNemar's exact test: that of a fair coin, tossed for each item on which models differ."""
    count, fewer = wins + losses, min(wins, losses)
    ways = tail = 1  # of 0 heads, and of at most so many
    for heads in range(fewer):
        ways = ways * (count - heads) // (heads + 1)
        tail += ways
    return min(float(2 * tail / 2**count), 1.0)


def _recovery(baseline: float, candidate: float, higher_is_better: bool) -> float:
    kept, of = (candidate, baseline) if higher_is_better else (baseline, candidate)
    return 100 * (kept / of) if of and math.isfinite(kept / of) else math.nan


def _wins_and_losses(first: MetricRun, second: MetricRun) -> tuple[int, int, bool]:
    """Items on which only the candidate, and only the baseline, is right or better; whether items are right or not."""
    if not _alike(first, second):
        return 0, 0, False
    theirs, ours = (parts(run.aggregation, run.results)[0] for run in (first, second))
    right_or_not = first.aggregation == "mean" and {*theirs, *ours} <= {0, 1}
    more, less = int((ours > theirs).sum()), int((ours < theirs).sum())
    less_is_better = not first.higher_is_better or first.aggregation != "mean"  # of negative log-likelihoods it is
    return (less, more, right_or_not) if less_is_better else (more, less, right_or_not)


def _alike(first: MetricRun, second: MetricRun) -> bool:
    """Whether both scores are the same function of a mean, over items of the same sizes."""
    if first.aggregation != second.aggregation or first.aggregation not in OF_MEANS:
        return False
    return np.array_equal(parts(first.aggregation, first.results)[1], parts(second.aggregation, second.results)[1])


# ------------------------------------------------------------------------------------------------- intervals


def _interval(first: MetricRun, second: MetricRun) -> Estimate:
    """Candidate - baseline."""
    if not _alike(first, second):
        return _rescored(first, second)
    (theirs, sizes), (ours, _) = (parts(run.aggregation, run.results) for run in (first, second))
    change = paired_mean_interval(ours - theirs, sizes)
    if first.aggregation in PERPLEXITIES:
        return change.mapped(lambda log_ratio: first.score.score * math.expm1(min(log_ratio, _LARGEST_EXPONENT)))
    return change.mapped(OF_MEANS[first.aggregation])


def _group_interval(first: GroupRun, second: GroupRun, members: Sequence[tuple[MetricRun, MetricRun]]) -> Estimate:
    """Items of all tasks are drawn together, those of a task with few weighing more where tasks count the same."""
    value = second.score.score - first.score.score
    if any(not _alike(*pair) or pair[0].aggregation != "mean" for pair in members):
        return Estimate(value, math.nan, math.nan)
    total = sum(len(run.items) for run, _ in members)
    changes = [
        (parts("mean", b.results)[0] - parts("mean", a.results)[0])
        * (1 if first.by_size else total / (len(members) * len(a.items)))
        for a, b in members
    ]
    return paired_mean_interval(np.concatenate(changes), np.ones(total))


def _rescored(first: MetricRun, second: MetricRun) -> Estimate:
    """Percentile interval of any function of the items."""
    count = len(first.items)
    value = second.score.score - first.score.score
    if first.results == second.results:
        return Estimate(value, value, value)
    if count < FEWEST_UNITS:
        return Estimate(value, math.nan, math.nan)
    generator = np.random.default_rng(_SEED)
    changes = []
    for _ in range(_SLOW_DRAWS):
        drawn = generator.integers(count, size=count).tolist()
        theirs, ours = (run.aggregate([run.results[item] for item in drawn]) for run in (first, second))
        changes.append(ours - theirs)
    low, high = np.quantile(changes, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))
