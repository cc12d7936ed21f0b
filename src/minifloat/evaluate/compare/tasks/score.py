"""`run_tasks`: run tasks with one model and return their scores with the results of all items."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.evaluate.compare.tasks.harness import evaluate
from minifloat.evaluate.compare.tasks.loaded_tasks import LoadedTasks, load_tasks
from minifloat.evaluate.compare.tasks.quiet import quiet
from minifloat.evaluate.compare.tasks.results import GroupRun, MetricRun, TaskRun, TaskScore, aggregation_name, mean


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str] | LoadedTasks,
    *,
    include_path: str | os.PathLike[str] | None = None,
    limit: float | None = None,
    num_fewshot: int | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    chat_template: bool = False,
    progress: Progress | None = None,
) -> TaskRun:
    """Run tasks of lm-evaluation-harness, and keep the result of every item."""
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit == int(limit))):
        raise UsageError(f"expected a whole number of items per task, or a share of them below 1, got {limit}")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"a batch has at least 1 request, got {batch_size}")
    if not isinstance(tasks, LoadedTasks):
        tasks = load_tasks(tasks, include_path=include_path, num_fewshot=num_fewshot)
    elif include_path is not None or num_fewshot is not None:
        raise UsageError("include_path and num_fewshot have no effect on loaded tasks: give them to load_tasks")
    results = evaluate(
        model,
        tokenizer,
        tasks,
        limit=limit,
        batch_size=batch_size,
        max_length=max_length,
        chat_template=chat_template,
        progress=progress,
    )
    with quiet():  # the harness draws a random number whenever a task is asked for its name
        metrics = [run for name, task in tasks.loaded["tasks"].items() for run in _metric_runs(name, task, results)]
        groups = [run for name, group in tasks.loaded["groups"].items() for run in _group_runs(name, group, results)]
    return TaskRun(tasks.names, version("lm_eval"), tuple(metrics), tuple(groups))


def _metric_runs(name: str, task: Any, results: dict[str, Any]) -> list[MetricRun]:
    runs = []
    higher = results["higher_is_better"].get(name, {})
    for key in _metric_keys(results["results"][name]):
        metric, _, filter_name = key.rpartition(",")
        samples = [s for s in results["samples"][name] if s["filter"] == filter_name and metric in s["metrics"]]
        values = tuple(_plain(sample[metric]) for sample in samples)
        aggregate = task.aggregation().get(metric, mean)
        score = _score(results["results"][name], key)
        runs.append(
            MetricRun(
                task=name,
                metric=_without_filter_none(key),
                higher_is_better=bool(higher.get(metric, True)),
                fewshot=int(results["n-shot"].get(name) or 0),
                score=score,
                items=tuple(_identify(sample) for sample in samples),
                results=values,
                aggregation=aggregation_name(aggregate, values, score.score),
                aggregate=aggregate,
            )
        )
    return runs


def _group_runs(name: str, group: Any, results: dict[str, Any]) -> list[GroupRun]:
    group_results = results["results"].get(name, {})
    by_size = {entry.metric: entry.weight_by_size for entry in group.aggregate_metric_list or ()}
    tasks = [task.task_name for task in group.get_all_tasks()]
    runs = []
    for key in _metric_keys(group_results):
        members = tuple(task for task in tasks if key in results["results"].get(task, {}))
        runs.append(
            GroupRun(
                name, _without_filter_none(key), _score(group_results, key), members, by_size[key.rpartition(",")[0]]
            )
        )
    return runs


def _metric_keys(task_results: dict[str, Any]) -> list[str]:
    """Return the keys ``metric,filter`` of a task's results."""
    return [key for key in task_results if "," in key and not key.rpartition(",")[0].endswith("_stderr")]


def _without_filter_none(key: str) -> str:
    return key.removesuffix(",none")


def _score(task_results: dict[str, Any], key: str) -> TaskScore:
    metric, _, filter_name = key.rpartition(",")
    stderr = task_results.get(f"{metric}_stderr,{filter_name}")
    return TaskScore(float(task_results[key]), math.nan if stderr is None or isinstance(stderr, str) else float(stderr))


def _identify(sample: dict[str, Any]) -> str:
    hashes = (sample.get(f"{part}_hash", "") for part in ("doc", "prompt", "target"))
    return "/".join((str(sample["doc_id"]), *hashes))


def _plain(value: Any) -> Any:
    """Convert arrays in a result to Python values, so that results can be compared with ``==``."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return tuple(_plain(entry) for entry in value)
    return value
