"""Tasks of lm-evaluation-harness (package lm-eval, extra `eval`) on two models, compared item by item.

A quantized model answers most items like the original, so the intervals of two separate scores are far too wide to show
a loss of one percent. Left out: tasks with images, and tasks that run generated code.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from minifloat.calibration.readers import first_line
from minifloat.errors import DataError, MinifloatError, NonFiniteError, UnknownNameError, UsageError
from minifloat.evaluate.compare.distributions import binomial_ends
from minifloat.evaluate.compare.intervals import CONFIDENCE, Estimate, paired_mean_interval, percentile_interval
from minifloat.evaluate.compare.models import EngineModel, Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Default seeds of the harness: of `random`, and of numpy, torch and the choice of examples.
_PYTHON_SEED, _SEED = 0, 1234
#: Resamplings for the standard error of a score that is not a mean: the harness' default takes minutes.
_RESAMPLINGS = 1000
_NEAR_NAMES = 8
#: Largest number of log-probabilities and of requests that transformers computes together; tokens of a request.
_BATCH_LOGITS, _LARGEST_BATCH, _REQUEST_TOKENS = 2**27, 16, 1024


@dataclass(frozen=True)
class TaskScore:
    score: float
    stderr: float


@dataclass(frozen=True)
class TaskDifference:
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


class Tasks:
    def __init__(self, names: Sequence[str], folder: str | os.PathLike[str] | None = None) -> None:
        self.names = tuple(names)
        if folder is not None and not Path(folder).is_dir():
            raise DataError(f"{folder}: no such folder of task files")
        with _seeds_kept():
            self.loaded = _load(names, None if folder is None else str(folder))
            for task in self.loaded["tasks"].values():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)

    def run(self, model: Model, tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> dict[str, Any]:
        """Return what `lm_eval.evaluate` says of a model, items included."""
        with _in_harness(model, tokenizer) as answering, _seeds_kept(), contextlib.redirect_stdout(sys.stderr):
            for task in self.loaded["tasks"].values():
                task.set_fewshot_seed(seed=_SEED)
            try:
                results: dict[str, Any] = _harness("lm_eval").evaluate(
                    answering, self.loaded, limit=limit, bootstrap_iters=_RESAMPLINGS, log_samples=True
                )
            except (MinifloatError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # templates, filters and metrics of tasks are code of many authors
                raise UsageError(
                    f"tasks {', '.join(self.names)}: lm-eval could not run them: "
                    f"{type(error).__name__}: {first_line(error)}"
                ) from error
        _refuse_nan(results["samples"])
        return results

    def compare(self, baseline: dict[str, Any], candidate: dict[str, Any]) -> tuple[TaskDifference, ...]:
        pairs = (baseline, candidate)
        rows = []
        for name, group in self.loaded["groups"].items():
            by_size = {entry.metric: entry.weight_by_size for entry in group.aggregate_metric_list or ()}
            for key in _metric_keys(baseline, name):
                names = [task.task_name for task in group.get_all_tasks()]
                members = [task for task in names if key in baseline["results"].get(task, {})]
                metrics = [_Metric.of(self.loaded["tasks"][task], task, key, pairs) for task in members]
                difference = _difference(name, key, pairs, metrics, by_size=by_size[key.rpartition(",")[0]])
                rows.append(replace(difference, members=tuple(members)))
        for name, task in self.loaded["tasks"].items():
            for key in _metric_keys(baseline, name):
                rows.append(_difference(name, key, pairs, [_Metric.of(task, name, key, pairs)]))
        return tuple(rows)


@contextlib.contextmanager
def _in_harness(model: Model, tokenizer: PreTrainedTokenizerBase) -> Iterator[Any]:
    """Give a model of the harness; it makes its own caches, so that keys and values of transformers are not rounded."""
    copied = copy.deepcopy(tokenizer)  # gets a padding token
    if not isinstance(model, EngineModel):
        from minifloat.evaluate.compare.transformers_model import TransformersModel

        assert isinstance(model, TransformersModel)
        batch = min(max(_BATCH_LOGITS // (_REQUEST_TOKENS * model.vocab_size), 1), _LARGEST_BATCH)
        with model.set_up(), torch.inference_mode():
            # In the dtype of the model, a document's sum would be rounded to a multiple of 4 or 8.
            yield _harness("lm_eval.models.huggingface").HFLM(
                model.model, backend="causal", tokenizer=copied, batch_size=batch, softmax_dtype="float32"
            )
    else:
        from minifloat.evaluate.lm_eval_model import MinifloatLM

        yield MinifloatLM(model.engine, tokenizer=copied)


def _load(names: Sequence[str], folder: str | None) -> dict[str, Any]:
    """Load tasks by name, pattern or file; the harness' own are indexed only if needed, because that takes seconds."""
    make = _harness("lm_eval.tasks").TaskManager
    for with_own in (True,) if folder is None else (False, True):
        manager = make(include_path=folder, include_defaults=with_own)
        found = [[name] if Path(name).is_file() else sorted(manager.match_tasks([name])) for name in names]
        try:
            if all(found):
                return dict(manager.load([name for matching in found for name in matching]))
        except Exception as error:  # a task file can be wrong in many ways, and run code of its own
            if with_own:
                raise DataError(
                    f"tasks {', '.join(names)}: cannot be loaded: {type(error).__name__}: {first_line(error)}"
                ) from error
    unknown = names[found.index([])]
    near = difflib.get_close_matches(unknown, manager.all_tasks, n=_NEAR_NAMES, cutoff=0.5)
    raise UnknownNameError("task", unknown, near or manager.all_tasks[:_NEAR_NAMES])


def _harness(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"tasks need lm-evaluation-harness: pip install 'minifloat[eval]' ({error})") from error


@contextlib.contextmanager
def _seeds_kept() -> Iterator[None]:
    """Give the harness its own seeds, and put back the state of all generators after it."""
    python, legacy = random.getstate(), np.random.get_state()
    # The harness would otherwise resample in copies of this process, which has a model and its threads.
    with torch.random.fork_rng(), mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"):
        random.seed(_PYTHON_SEED)
        np.random.seed(_SEED)
        torch.manual_seed(_SEED)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def _refuse_nan(samples: dict[str, list[dict[str, Any]]]) -> None:
    for task, items in samples.items():
        for item in items:
            numbers = np.array([x for x in _flat(item["resps"]) if isinstance(x, float)])
            if np.isnan(numbers).any():
                raise NonFiniteError("logits", f"NaN in the answer to item {item['doc_id']} of task {task}")


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from _flat(entry)
    else:
        yield value


@dataclass(frozen=True)
class _Metric:
    """The results of the items of a task under both models, and the function that makes a score of them."""

    results: tuple[Sequence[Any], Sequence[Any]]
    aggregate: Callable[[Sequence[Any]], float]
    scores: npt.NDArray[np.float64]
    is_mean: bool

    @classmethod
    def of(cls, task: Any, name: str, key: str, pairs: Sequence[dict[str, Any]]) -> _Metric:
        metric, _, filter_name = key.rpartition(",")
        items = [
            [s for s in run["samples"][name] if s["filter"] == filter_name and metric in s["metrics"]] for run in pairs
        ]
        identities = [[(s["doc_id"], s["doc_hash"], s["prompt_hash"]) for s in of_model] for of_model in items]
        if identities[0] != identities[1]:
            raise UsageError(f"task {name}, {metric}: the two runs have other items or prompts")
        results = tuple([sample[metric] for sample in of_model] for of_model in items)
        aggregate = task.aggregation().get(metric, np.mean)
        scores = np.array([[_score_of(aggregate, value) for value in of_model] for of_model in results])
        whole = [run["results"][name][key] for run in pairs]
        is_mean = all(
            math.isclose(np.mean(of_one), score, rel_tol=1e-9) for of_one, score in zip(scores, whole, strict=True)
        )
        return cls((results[0], results[1]), aggregate, scores, is_mean)

    def interval(self) -> Estimate:
        if self.is_mean:
            return paired_mean_interval(self.scores[1] - self.scores[0], np.ones(self.scores.shape[1]))

        def difference(items: Sequence[int]) -> float:
            first, second = (self.aggregate([of_model[item] for item in items]) for of_model in self.results)
            return second - first

        return percentile_interval(difference(range(len(self.results[0]))), len(self.results[0]), difference)


def _score_of(aggregate: Callable[[Sequence[Any]], float], value: Any) -> float:
    try:
        return float(aggregate([value]))
    except Exception:  # a score of several items only
        return math.nan


def _difference(
    name: str, key: str, pairs: Sequence[dict[str, Any]], metrics: Sequence[_Metric], *, by_size: bool | None = None
) -> TaskDifference:
    """Compare one score of a task, or of a group of tasks: then `by_size` says whether their items count the same."""
    baseline, candidate = (_task_score(run["results"][name], key) for run in pairs)
    metric, higher = key.rpartition(",")[0], True
    if pairs[0]["higher_is_better"].get(name, {}).get(metric) is False:
        higher = False
    changes = [of_one.scores[1] - of_one.scores[0] for of_one in metrics]
    total = sum(map(len, changes))
    more, less = (sum(int((sign * change > 0).sum()) for change in changes) for sign in (1, -1))
    wins, losses = (more, less) if higher else (less, more)
    right_or_wrong = all(of_one.is_mean and np.isin(of_one.scores, (0, 1)).all() for of_one in metrics)
    if by_size is None:
        interval = metrics[0].interval()
    elif all(of_one.is_mean for of_one in metrics):
        weighted = [change * (1 if by_size else total / (len(changes) * len(change))) for change in changes]
        interval = paired_mean_interval(np.concatenate(weighted), np.ones(total))
    else:
        interval = Estimate(candidate.score - baseline.score, math.nan, math.nan)
    if right_or_wrong and interval.known and not more + less:
        # Equal on every item sampled is not equal on all: the most items that may differ, either way (rule of three).
        rows = min(map(len, changes)) * len(changes) if by_size is False else total
        most = binomial_ends(0, rows, (1 - CONFIDENCE) / 2)[1]
        interval = Estimate(0.0, -most, most)
    kept = (candidate.score, baseline.score) if higher else (baseline.score, candidate.score)
    return TaskDifference(
        task=name,
        metric=key.removesuffix(",none"),
        items=total,
        baseline=baseline,
        candidate=candidate,
        difference=interval,
        recovery=100 * (kept[0] / kept[1]) if kept[1] and math.isfinite(kept[0] / kept[1]) else math.nan,
        wins=wins,
        losses=losses,
        mcnemar_p=_mcnemar(wins, losses) if right_or_wrong else None,
        higher_is_better=higher,
        fewshot=int(pairs[0]["n-shot"].get(name) or 0),
    )


def _mcnemar(wins: int, losses: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: items that differ are tosses of a fair coin."""
    return float(_harness("scipy.stats").binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def _metric_keys(run: dict[str, Any], task: str) -> list[str]:
    keys = run["results"].get(task, {})
    return [key for key in keys if "," in key and not key.rpartition(",")[0].endswith("_stderr")]


def _task_score(results: dict[str, Any], key: str) -> TaskScore:
    metric, _, filter_name = key.rpartition(",")
    stderr = results.get(f"{metric}_stderr,{filter_name}")
    return TaskScore(float(results[key]), float(stderr) if isinstance(stderr, (int, float)) else math.nan)
