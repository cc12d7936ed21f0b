"""Two runs of the same tasks, compared item by item.

Source: Q. McNemar, Note on the sampling error of the difference between correlated proportions or percentages,
Psychometrika 12 (1947).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minifloat.errors import UsageError
from minifloat.evaluate.compare.intervals import Estimate, paired_mean_interval, percentile_interval
from minifloat.evaluate.compare.tasks.results import (
    OF_MEANS,
    PERPLEXITIES,
    GroupRun,
    MetricRun,
    TaskRun,
    TaskScore,
    parts,
)

_LARGEST_EXPONENT = math.log(np.finfo(np.float64).max)


@dataclass(frozen=True)
class TaskDifference:
    """A task's score under both models.

    Attributes:
        recovery: Percent of the baseline's score that the candidate keeps: candidate / baseline, or baseline /
            candidate where less is better; NaN where the quotient is not a finite number.
        mcnemar_p: Two-sided p-value of McNemar's exact test: the probability of wins and losses as uneven as these
            where both are equally likely; None where items are not right or wrong.
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
    """Compare two runs item by item; groups come first."""
    baseline_runs, candidate_runs = (
        {(run.task, run.metric): run for run in side.metrics} for side in (baseline, candidate)
    )
    candidate_groups = {(run.group, run.metric): run for run in candidate.groups}
    baseline_groups = {(run.group, run.metric) for run in baseline.groups}
    if baseline_runs.keys() != candidate_runs.keys() or baseline_groups != candidate_groups.keys():
        raise UsageError(f"runs of different tasks: {', '.join(baseline.tasks)} and {', '.join(candidate.tasks)}")
    for key, run in baseline_runs.items():
        _refuse_other_items(run, candidate_runs[key])
    groups = [
        _group_difference(
            run,
            candidate_groups[run.group, run.metric],
            [(baseline_runs[task, run.metric], candidate_runs[task, run.metric]) for task in run.members],
        )
        for run in baseline.groups
    ]
    return (*groups, *(_difference(run, candidate_runs[key]) for key, run in baseline_runs.items()))


def _refuse_other_items(baseline: MetricRun, candidate: MetricRun) -> None:
    if baseline.items == candidate.items:
        return
    if len(baseline.items) != len(candidate.items):
        mismatch = f"{len(baseline.items)} and {len(candidate.items)}"
    else:
        first = next(a for a, b in zip(baseline.items, candidate.items, strict=True) if a != b)
        mismatch = f"the first that differs is item {first.partition('/')[0]}"
    raise UsageError(
        f"task {baseline.task}, {baseline.metric}: the two runs have other items or prompts ({mismatch}); run both "
        "with the same data, limit and examples"
    )


def _difference(baseline: MetricRun, candidate: MetricRun) -> TaskDifference:
    wins, losses, right_or_wrong = _wins_and_losses(baseline, candidate)
    return TaskDifference(
        task=baseline.task,
        metric=baseline.metric,
        items=len(baseline.items),
        baseline=baseline.score,
        candidate=candidate.score,
        difference=_interval(baseline, candidate),
        recovery=_recovery(baseline.score.score, candidate.score.score, baseline.higher_is_better),
        wins=wins,
        losses=losses,
        mcnemar_p=mcnemar(wins, losses) if right_or_wrong else None,
        higher_is_better=baseline.higher_is_better,
        fewshot=baseline.fewshot,
    )


def _group_difference(
    baseline: GroupRun, candidate: GroupRun, members: Sequence[tuple[MetricRun, MetricRun]]
) -> TaskDifference:
    counts = [_wins_and_losses(*pair) for pair in members]
    wins, losses = sum(count[0] for count in counts), sum(count[1] for count in counts)
    higher_is_better = all(run.higher_is_better for run, _ in members)
    return TaskDifference(
        task=baseline.group,
        metric=baseline.metric,
        items=sum(len(run.items) for run, _ in members),
        baseline=baseline.score,
        candidate=candidate.score,
        difference=_group_interval(baseline, candidate, members),
        recovery=_recovery(baseline.score.score, candidate.score.score, higher_is_better),
        wins=wins,
        losses=losses,
        mcnemar_p=mcnemar(wins, losses) if all(count[2] for count in counts) else None,
        higher_is_better=higher_is_better,
        fewshot=max((run.fewshot for run, _ in members), default=0),
        members=baseline.members,
    )


def mcnemar(wins: int, losses: int) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    The test treats every item on which the models differ as the toss of a fair coin.
    """
    count, fewer = wins + losses, min(wins, losses)
    ways = tail = 1  # number of outcomes with exactly `heads` heads, and with at most so many
    for heads in range(fewer):
        ways = ways * (count - heads) // (heads + 1)
        tail += ways
    return min(float(2 * tail / 2**count), 1.0)


def _recovery(baseline: float, candidate: float, higher_is_better: bool) -> float:
    numerator, denominator = (candidate, baseline) if higher_is_better else (baseline, candidate)
    if denominator and math.isfinite(numerator / denominator):
        return 100 * (numerator / denominator)
    return math.nan


def _wins_and_losses(baseline: MetricRun, candidate: MetricRun) -> tuple[int, int, bool]:
    """Return the wins, the losses, and whether the items are right or wrong."""
    if not _comparable(baseline, candidate):
        return 0, 0, False
    baseline_sums, candidate_sums = (parts(run.aggregation, run.results)[0] for run in (baseline, candidate))
    right_or_wrong = baseline.aggregation == "mean" and {*baseline_sums, *candidate_sums} <= {0, 1}
    more, less = int((candidate_sums > baseline_sums).sum()), int((candidate_sums < baseline_sums).sum())
    # Every aggregation but the mean sums negative log-likelihoods, of which less is better.
    less_is_better = not baseline.higher_is_better or baseline.aggregation != "mean"
    return (less, more, right_or_wrong) if less_is_better else (more, less, right_or_wrong)


def _comparable(baseline: MetricRun, candidate: MetricRun) -> bool:
    """Return whether both scores are the same function of a mean, over items of the same sizes."""
    if baseline.aggregation != candidate.aggregation or baseline.aggregation not in OF_MEANS:
        return False
    baseline_sizes, candidate_sizes = (parts(run.aggregation, run.results)[1] for run in (baseline, candidate))
    return np.array_equal(baseline_sizes, candidate_sizes)


# ------------------------------------------------------------------------------------------------- intervals


def _interval(baseline: MetricRun, candidate: MetricRun) -> Estimate:
    """Estimate candidate - baseline."""
    if not _comparable(baseline, candidate):
        return _rescored(baseline, candidate)
    (baseline_sums, sizes), (candidate_sums, _) = (parts(run.aggregation, run.results) for run in (baseline, candidate))
    change = paired_mean_interval(candidate_sums - baseline_sums, sizes)
    if baseline.aggregation in PERPLEXITIES:
        perplexity = baseline.score.score
        return change.mapped(lambda log_ratio: perplexity * math.expm1(min(log_ratio, _LARGEST_EXPONENT)))
    return change.mapped(OF_MEANS[baseline.aggregation])


def _group_interval(
    baseline: GroupRun, candidate: GroupRun, members: Sequence[tuple[MetricRun, MetricRun]]
) -> Estimate:
    """Estimate candidate - baseline of a group; the bootstrap draws from the items of all its tasks together.

    Where tasks count the same, an item of a task with few items weighs more.
    """
    value = candidate.score.score - baseline.score.score
    if any(not _comparable(*pair) or pair[0].aggregation != "mean" for pair in members):
        return Estimate(value, math.nan, math.nan)
    total = sum(len(run.items) for run, _ in members)
    changes = [
        (parts("mean", second.results)[0] - parts("mean", first.results)[0])
        * (1 if baseline.by_size else total / (len(members) * len(first.items)))
        for first, second in members
    ]
    return paired_mean_interval(np.concatenate(changes), np.ones(total))


def _rescored(baseline: MetricRun, candidate: MetricRun) -> Estimate:
    """Estimate candidate - baseline of a score that is not a function of a mean; every draw computes the score."""
    value = candidate.score.score - baseline.score.score
    if baseline.results == candidate.results:
        return Estimate(value, value, value)

    def difference(items: list[int]) -> float:
        first, second = (run.aggregate([run.results[item] for item in items]) for run in (baseline, candidate))
        return second - first

    return percentile_interval(value, len(baseline.items), difference)
