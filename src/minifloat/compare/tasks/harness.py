"""A model of transformers as lm-evaluation-harness runs it, with batches that fit and an error where an answer is NaN.

Log-probabilities are taken in float32 whatever the model's dtype: summed in bfloat16, as the harness does unless told
otherwise, those of a document would be rounded to a multiple of 4 or 8.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from minifloat.calibration.readers import first_line
from minifloat.compare.tasks.loaded_tasks import LoadedTasks
from minifloat.compare.tasks.quiet import harness, quiet
from minifloat.errors import MinifloatError, NonFiniteError, UsageError
from minifloat.report.progress import Progress

#: Seeds that the harness sets unless told otherwise.
_PYTHON_SEED, _SEED = 0, 1234
#: Resamplings behind the standard error of a metric that is not a mean; the harness takes 100 times as many, which
#: takes minutes and changes the third digit.
_RESAMPLINGS = 1000
#: Log-probabilities that one forward pass may make.
_BATCH_LOGITS = 2**27
_LARGEST_BATCH = 16
_GENERATED_TOGETHER = 8

_DOING = {
    "loglikelihood": "scoring answers",
    "loglikelihood_rolling": "scoring documents",
    "generate_until": "generating answers",
}


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: LoadedTasks,
    *,
    limit: float | None,
    batch_size: int | None,
    max_length: int | None,
    chat_template: bool,
    progress: Progress | None,
) -> dict[str, Any]:
    """Run tasks and return what `lm_eval.evaluate` does, samples included; for arguments and errors see `run_tasks`."""
    with quiet():
        wrapped = _wrap(model, tokenizer, batch_size, max_length, _Counter(tasks, progress))
    with quiet(warn=True), torch.inference_mode():
        random.seed(_PYTHON_SEED)
        np.random.seed(_SEED)
        torch.manual_seed(_SEED)
        for task in tasks.loaded["tasks"].values():
            task.set_fewshot_seed(seed=_SEED)
        # The harness would fork a process that holds a model and its threads.
        with _environment("DISABLE_MULTIPROC", "1"):
            try:
                results: dict[str, Any] = harness("lm_eval.evaluator").evaluate(
                    wrapped,
                    tasks.loaded,
                    limit=limit,
                    bootstrap_iters=_RESAMPLINGS,
                    log_samples=True,
                    apply_chat_template=chat_template,
                    fewshot_as_multiturn=chat_template,
                )
            except (MinifloatError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # templates, filters and metrics of tasks are code of many authors
                raise UsageError(
                    f"tasks {', '.join(tasks.names)}: lm-eval could not run them: "
                    f"{type(error).__name__}: {first_line(error)}"
                ) from error
        return results


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int | None,
    max_length: int | None,
    counter: _Counter,
) -> Any:
    """A model as the harness wants it. The tokenizer is a copy, since it is given a padding token."""
    parent = harness("lm_eval.models.huggingface").HFLM
    try:
        wrapped = type("MinifloatModel", (_Watched, parent), {})(
            pretrained=model,
            backend="causal",
            tokenizer=copy.deepcopy(tokenizer),
            batch_size=batch_size or 1,
            max_length=max_length,
            softmax_dtype="float32",
        )
    except Exception as error:
        raise UsageError(
            f"{model.config.name_or_path}: lm-eval cannot run this model: {type(error).__name__}: {first_line(error)}"
        ) from error
    wrapped.fixed_batch_size = batch_size
    wrapped.cache_hook = counter
    return wrapped


class _Counter:
    """Stands where the harness has its cache of answers, which is told of each request that is done."""

    def __init__(self, tasks: LoadedTasks, progress: Progress | None) -> None:
        self._tasks, self._progress = tasks.loaded["tasks"].values(), progress
        self._done = self._total = 0

    def add_partial(self, kind: str, *_: Any) -> None:
        if self._progress is None:
            return
        if not self._total:
            self._total = sum(instance.repeats or 1 for task in self._tasks for instance in task.instances)
        self._done += 1
        self._progress(min(self._done, self._total), self._total, _DOING.get(kind, kind))


class _Watched:
    """What is put before the harness' model class: batches that fit, no bars, and an error where an answer is NaN."""

    fixed_batch_size: int | None
    batch_size_per_gpu: int
    max_length: int
    model: PreTrainedModel

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations and whether each is what greedy decoding gives."""
        del disable_tqdm
        answers: list[tuple[float, bool]] = cast(Any, super()).loglikelihood(requests, disable_tqdm=True)
        _refuse_nan(requests, (answer[0] for answer in answers))
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihoods of documents, a few at a time so that progress is seen."""
        del disable_tqdm
        answers: list[float] = []
        for start in range(0, len(requests), _LARGEST_BATCH):
            some = requests[start : start + _LARGEST_BATCH]
            self.batch_size_per_gpu = self.fixed_batch_size or _LARGEST_BATCH
            answers += cast(Any, super()).loglikelihood_rolling(some, disable_tqdm=True)
            _refuse_nan(some, answers[start:])
        return answers

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        del disable_tqdm, override_bs
        vocabulary = self.model.config.get_text_config().vocab_size
        longest = max((min(len(context) + len(rest), self.max_length) for _, context, rest in requests), default=1)
        fitting = max(min(_BATCH_LOGITS // (longest * vocabulary), _LARGEST_BATCH), 1)
        before, self.batch_size_per_gpu = self.batch_size_per_gpu, self.fixed_batch_size or fitting
        try:
            answers: list[tuple[float, bool]] = cast(Any, super())._loglikelihood_tokens(requests, disable_tqdm=True)
        finally:
            self.batch_size_per_gpu = before
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Texts as far as a stop sequence."""
        del disable_tqdm
        self.batch_size_per_gpu = self.fixed_batch_size or _GENERATED_TOGETHER
        answers: list[str] = cast(Any, super()).generate_until(requests, disable_tqdm=True)
        return answers

    def _model_generate(self, *arguments: Any, **options: Any) -> Tensor:
        options["logits_processor"] = LogitsProcessorList([_RefuseNaN()])
        tokens: Tensor = cast(Any, super())._model_generate(*arguments, **options)
        return tokens


def _refuse_nan(requests: Sequence[Any], values: Iterable[float]) -> None:
    for request, value in zip(requests, values, strict=True):
        if math.isnan(value):
            raise NonFiniteError("logits", f"NaN in the answer to item {request.doc_id} of task {request.task_name}")


class _RefuseNaN(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.isnan().any():
            raise NonFiniteError("logits", f"NaN where token {input_ids.shape[1]} of an answer is generated")
        return scores
