"""The tasks of a comparison: formatting of scores and differences, and the section of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from minifloat.evaluate.compare.pages.charts import dot_figure
from minifloat.evaluate.compare.pages.numbers import interval_parts, number
from minifloat.evaluate.compare.tasks import TaskDifference, TaskScore
from minifloat.report.axes import Axis
from minifloat.report.charts import Dot
from minifloat.report.page import Cell, paragraph, section, stacked, table
from minifloat.report.text import visible


def recovery(task: TaskDifference) -> str:
    """Format the percentage of the baseline's score that the candidate keeps."""
    return f"{task.recovery:.1f}%" if math.isfinite(task.recovery) else "-"


def task_score(task: TaskDifference, score: TaskScore) -> str:
    """Format a score with its standard error; in percent where items are right or wrong."""
    as_percent = task.mcnemar_p is not None
    text = f"{score.score:.1%}" if as_percent else number(score.score)
    if not math.isfinite(score.stderr):
        return text
    return f"{text} ± {100 * score.stderr:.1f}" if as_percent else f"{text} ± {number(score.stderr, 2)}"


def task_difference(task: TaskDifference) -> str:
    """Format candidate - baseline with its interval; in percentage points where items are right or wrong."""
    return " ".join(_difference(task))


def _difference(task: TaskDifference) -> tuple[str, str]:
    value, interval = interval_parts(task.difference, as_percent=task.mcnemar_p is not None, signed=True)
    return value.replace("%", " pp"), interval


def tasks_section(candidates: Sequence[tuple[str, Sequence[TaskDifference]]]) -> str:
    """Return the page's section on tasks; empty if no task was run."""
    candidates = [(name, tasks) for name, tasks in candidates if tasks]
    by_label: dict[str, list[tuple[str, TaskDifference]]] = {}
    for name, tasks in candidates:
        for task in tasks:
            by_label.setdefault(_label(task), []).append((name, task))
    if not candidates:
        return ""
    columns = ("task", "items", "baseline", "candidate", "difference", "recovery", "better : worse")
    rows: list[list[Cell]] = []
    for label, entries in by_label.items():
        if len(candidates) > 1:
            rows.append([label])
        rows += [[name if len(candidates) > 1 else label, *_row(task)] for name, task in entries]
    note = (
        "Scores ± standard error. The difference is paired, over the same items; in percentage points (pp) where items "
        "are right or wrong. Recovery: how much of the baseline's score is kept. Better : worse: items that only the "
        "candidate, and only the baseline, gets right; p: McNemar's, small where they are too uneven for chance."
    )
    return section("Tasks", _chart(candidates, by_label), table(columns, rows), paragraph(note))


def _label(task: TaskDifference) -> str:
    shots = f", {task.fewshot} examples" if task.fewshot else ""
    return f"{visible(task.task)}, {visible(task.metric)}{shots}"


def _row(task: TaskDifference) -> list[Cell]:
    value, interval = _difference(task)
    p = "" if task.mcnemar_p is None else f"p {number(task.mcnemar_p, 2)}"
    return [
        f"{task.items:,}",
        task_score(task, task.baseline),
        task_score(task, task.candidate),
        stacked(value, interval),
        recovery(task),
        stacked(f"{task.wins} : {task.losses}", p),
    ]


def _chart(
    candidates: Sequence[tuple[str, Sequence[TaskDifference]]],
    by_label: Mapping[str, Sequence[tuple[str, TaskDifference]]],
) -> str:
    """Draw the differences of the tasks whose items are right or wrong, with their intervals."""
    rows = []
    for label, entries in by_label.items():
        tasks = [task for _, task in entries]
        if len(tasks) == len(candidates) and all(task.mcnemar_p is not None for task in tasks):
            changes = [task.difference for task in tasks]
            dots = [
                Dot(change.value, task_difference(task), change.low, change.high)
                for task, change in zip(tasks, changes, strict=True)
            ]
            rows.append((label, dots))
    axis = Axis("difference of scores, percentage points", percent=True)
    caption = "Candidate's score less the baseline's, with its 95% interval"
    return dot_figure(rows, [name for name, _ in candidates], caption, axis, (0.0, "no difference"))
