"""`compare_models`: run models over the same text, compare their predictions, and judge the difference.

This module opens models and text, runs all measurements and assembles the result. `corpus` cuts text into windows,
`scoring_pass` runs the models over the windows, `summary` reduces the scores, `verdict` judges them, and
`extra_measurements` does the rest (continuations, tasks, attribution).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minifloat._version import __version__
from minifloat.calibration.data import SourceLike, as_source
from minifloat.calibration.readers import locate
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.evaluate.compare.assembly import as_sources, assembled, judged, model_record, window_tokens
from minifloat.evaluate.compare.corpus import Corpus
from minifloat.evaluate.compare.extra_measurements import ExtraMeasurements
from minifloat.evaluate.compare.kv_cache import CacheFactory, kv_cache_factory
from minifloat.evaluate.compare.measurements import MeasurementLog
from minifloat.evaluate.compare.models import (
    ModelLike,
    Predictor,
    common_tokenizer,
    load_options,
    longest_window,
    match_experts_implementation,
)
from minifloat.evaluate.compare.options import CompareOptions
from minifloat.evaluate.compare.result import Comparison
from minifloat.evaluate.compare.scoring_pass import ModelsPass
from minifloat.evaluate.compare.tasks import Tasks


def compare_models(
    baseline: ModelLike,
    candidates: ModelLike | Sequence[ModelLike],
    data: SourceLike | Sequence[SourceLike] = (),
    options: CompareOptions | None = None,
    *,
    progress: Progress | None = None,
) -> Comparison:
    """Measure how far the candidates' predictions are from the baseline's, and judge whether they are close enough.

    A checkpoint that declares FP8 inputs or an FP8 KV cache is run with them, as servers with FP8 hardware run it, so
    that the results are those of serving. Its output layer has the format that `minifloat serve` gives it. With
    `variants`, a candidate that declares both is run three times: as declared, without rounding keys and values, and
    with quantized weights alone, which is what servers without FP8 hardware compute. Each run is a candidate of its
    own.

    All models run at the same time and see the same tokens. If one model has quantized experts, all
    mixture-of-experts models run transformers' eager experts, so that a different order of summation is not mistaken
    for a difference of the weights.

    After at least one batch of every text, Ctrl-C ends the measurement but not the function: the function returns the
    results so far, and `Comparison.partial` is true.

    Args:
        baseline: A folder, a model of the hub, or a model from `minifloat.model.runtime.load.load`.
        candidates: One or several models, given like the baseline.
        data: Text, as for `calibrate`: paths of files and folders, or names of data sets of the hub, with options after
            a ``#``. By default the two short texts that come with minifloat.
        options: How the models run, and what is measured; None: `CompareOptions()`.
        progress: Called after each batch with tokens done, tokens in total, and the name of the text.

    Raises:
        UsageError: If two models have different vocabularies, if a text or window cannot be used, or if `resume` is a
            folder of another comparison.
        DataError: If a text does not exist or cannot be read.
        NonFiniteError: If a model's logits are NaN or Inf; the message names the first such token.
        CheckpointError: If a folder cannot be loaded.
        HubError: If the hub does not have the model, refuses it, or cannot be reached.
        UnknownNameError: If a task is not a valid name.
    """
    comparison = _RunningComparison(
        baseline, _as_list(candidates), as_sources(data), options or CompareOptions(), progress
    )
    return comparison.result()


class _RunningComparison:
    """A comparison with its models and texts open."""

    def __init__(
        self,
        baseline: ModelLike,
        candidates: Sequence[ModelLike],
        data: Sequence[SourceLike],
        options: CompareOptions,
        progress: Progress | None,
    ) -> None:
        if not candidates:
            raise UsageError("no model to compare with the baseline")
        if options.resume is not None and any(isinstance(m, PreTrainedModel) for m in (baseline, *candidates)):
            raise UsageError("resume needs folders: a loaded model may have been changed since")
        for source in data:
            locate(as_source(source))  # report a missing source before loading models
        tasks = Tasks(options.tasks, options.task_path) if options.tasks else None
        self._options, self._progress = options, progress
        self._notes: list[str] = []
        self.baseline = Predictor.of(baseline, _load_options(options), options.revision)
        self.candidates = [variant for candidate in candidates for variant in self._variants(candidate)]
        models = (self.baseline, *self.candidates)
        self.tokenizer: PreTrainedTokenizerBase = common_tokenizer(models)
        self.window = window_tokens(options.window, longest_window(models))
        for model in models:
            model.check_window(self.window)
        match_experts_implementation(models)
        self.corpus = Corpus(data, self.tokenizer, self.window, options.max_tokens, self.baseline.vocab_size)
        self._extra = ExtraMeasurements(
            self.baseline,
            self.candidates,
            self.corpus,
            self.tokenizer,
            prompts=options.prompts,
            new_tokens=options.new_tokens,
            tasks=tasks,
            task_limit=options.task_limit,
            attribution_seconds=options.attribute,
            tolerance=options.tolerance,
            progress=progress,
        )

    def _variants(self, candidate: ModelLike) -> list[Predictor]:
        """Load a candidate and return it as declared, with its other variants if the options request them."""
        options = self._options
        own = _load_options(options) | {"lm_head": options.lm_head, "activations": options.activations}
        model = Predictor.of(candidate, own, read_kv_scales=options.kv_cache != "none")
        if isinstance(candidate, PreTrainedModel):
            return [model]
        new_cache = self._new_cache(model)
        variants = [model if new_cache is None else replace(model, new_cache=new_cache)]
        if not options.variants:
            return variants
        if new_cache is not None:
            variants.append(replace(model, name=f"{model.name} (KV cache not rounded)"))
        if model.quantizes_inputs():
            variants.append(replace(model, name=f"{model.name} (weights only)", weight_only=True))
        return variants

    def _new_cache(self, model: Predictor) -> CacheFactory | None:
        """Return the factory of a candidate's simulated KV cache; None if its cache is not to be simulated."""
        requested = self._options.kv_cache
        if model.kv_scales is None and requested != "fp8":
            return None
        try:
            return kv_cache_factory(model.model, model.kv_scales or {})
        except UsageError as error:
            if requested == "fp8":
                raise
            self._notes.append(f"{model.name}: keys and values are not rounded: {error}")
            return None

    def result(self) -> Comparison:
        """Run all measurements and return the result."""
        started = time.perf_counter()
        scoring = ModelsPass(self.baseline, self.candidates, self.corpus)
        if self._options.resume is not None:
            scoring.log = MeasurementLog(self._options.resume, self._settings(), scoring.worst)
        try:
            scoring.run(self._progress)
        except KeyboardInterrupt:
            if scoring.empty:
                raise
        candidates = [
            judged(scoring, index, model_record(model), self.tokenizer, self._options.tolerance)
            for index, model in enumerate(self.candidates)
        ]
        seconds = time.perf_counter() - started
        if scoring.done == scoring.total:
            candidates = self._extra.add_to(candidates)
        return assembled(
            scoring,
            model_record(self.baseline),
            candidates,
            seconds=seconds,
            command=self._options.command,
            notes=(*self._notes, *self._extra.notes),
        )

    def _settings(self) -> dict[str, Any]:
        """Return everything that the scores depend on, for the measurement log."""
        options = self._options
        return {
            "minifloat": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "models": [_fingerprint(model) for model in (self.baseline, *self.candidates)],
            "texts": [[text.name, text.sha256, text.unit] for text in self.corpus.texts],
            "window": self.window,
            "dtype": self.baseline.dtype,
            "device": str(options.device),
            "impl": options.impl,
        }


def _fingerprint(model: Predictor) -> dict[str, Any]:
    """Identify a folder's weights without reading them: by path, config, and the shards' sizes and times of change."""
    checkpoint = model.headers()
    stats = {name: (checkpoint.path / name).stat() for name in checkpoint.shards}
    return {
        "folder": str(checkpoint.path.resolve()),
        "config": checkpoint.config,
        "shards": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "activations": model.activations,
        "kv_cache": model.new_cache is not None,
        "lm_head": model.lm_head,
    }


def _load_options(options: CompareOptions) -> dict[str, Any]:
    return load_options(options) | {"weight_only": options.weight_only}


def _as_list(candidates: ModelLike | Sequence[ModelLike]) -> list[ModelLike]:
    if isinstance(candidates, (PreTrainedModel, str, os.PathLike)):
        return [candidates]
    return list(candidates)
