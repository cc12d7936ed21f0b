"""A transformers model in lm-evaluation-harness, with batches that fit into memory and an error for NaN answers.

Log-probabilities are computed in float32 for every dtype of the model. The harness by default sums them in bfloat16,
which would round the sum of a document to a multiple of 4 or 8.
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
from minifloat.checkpoint.progress import Progress
from minifloat.errors import MinifloatError, NonFiniteError, UsageError
from minifloat.evaluate.compare.tasks.loaded_tasks import LoadedTasks
from minifloat.evaluate.compare.tasks.quiet import harness, quiet

#: Default seeds of the harness.
_PYTHON_SEED, _SEED = 0, 1234
#: Resamplings for the standard error of a metric that is not a mean. The harness makes 100 times as many by default,
#: which takes minutes and changes the third digit.
_RESAMPLINGS = 1000
#: Largest number of log-probabilities of one forward pass.
_BATCH_LOGITS = 2**27
_LARGEST_BATCH = 16
_GENERATED_TOGETHER = 8

_ACTIVITIES = {
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
    """Run tasks and return the results of `lm_eval.evaluate`, samples included."""
    with quiet():
        wrapped = _wrap(model, tokenizer, batch_size, max_length, _RequestCounter(tasks, progress))
    with quiet(warn=True), torch.inference_mode():
        random.seed(_PYTHON_SEED)
        np.random.seed(_SEED)
        torch.manual_seed(_SEED)
        for task in tasks.loaded["tasks"].values():
            task.set_fewshot_seed(seed=_SEED)
        # Without the variable, the harness would fork this process, which has a model and its threads.
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
    counter: _RequestCounter,
) -> Any:
    """Wrap a model for the harness. The tokenizer is copied because the harness adds a padding token to it."""
    parent = harness("lm_eval.models.huggingface").HFLM
    try:
        wrapped = type("MinifloatModel", (_CheckedModel, parent), {})(
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


class _RequestCounter:
    """Progress reports, in place of the harness' cache of answers, which it calls after each request."""

    def __init__(self, tasks: LoadedTasks, progress: Progress | None) -> None:
        self._tasks, self._progress = tasks.loaded["tasks"].values(), progress
        self._done = self._total = 0

    def add_partial(self, kind: str, *_: Any) -> None:
        if self._progress is None:
            return
        if not self._total:
            self._total = sum(instance.repeats or 1 for task in self._tasks for instance in task.instances)
        self._done += 1
        self._progress(min(self._done, self._total), self._total, _ACTIVITIES.get(kind, kind))


class _CheckedModel:
    """Mixin for the harness' model class: batches that fit, no progress bars, and an error for NaN answers."""

    fixed_batch_size: int | None
    batch_size_per_gpu: int
    max_length: int
    model: PreTrainedModel

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-likelihoods of continuations, each with whether greedy decoding gives this continuation."""
        del disable_tqdm
        answers: list[tuple[float, bool]] = cast(Any, super()).loglikelihood(requests, disable_tqdm=True)
        _refuse_nan(requests, (answer[0] for answer in answers))
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihoods of documents, computed a few at a time so that progress is visible."""
        del disable_tqdm
        answers: list[float] = []
        for start in range(0, len(requests), _LARGEST_BATCH):
            batch = requests[start : start + _LARGEST_BATCH]
            self.batch_size_per_gpu = self.fixed_batch_size or _LARGEST_BATCH
            answers += cast(Any, super()).loglikelihood_rolling(batch, disable_tqdm=True)
            _refuse_nan(batch, answers[start:])
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
        """Generate texts up to a stop sequence."""
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
