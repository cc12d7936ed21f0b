"""Is the quantized model still the same model? Models are run over the same text, and what they predict is compared.

This is the front: it opens models and text, has everything measured, and puts the answers together. Windows and their
order are `corpus`' business, the pass over them is `scoring`'s, what comes of it `summary`'s, and `verdict` judges.
"""

from __future__ import annotations

import datetime
import os
import platform
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
from minifloat.checkpoint import Checkpoint
from minifloat.compare.corpus import DEFAULT_WINDOW, Corpus
from minifloat.compare.extra_measurements import ExtraMeasurements
from minifloat.compare.kv_cache import CacheFactory, kv_cache_factory
from minifloat.compare.measurements import MeasurementLog
from minifloat.compare.metrics import concatenate
from minifloat.compare.models import (
    ModelLike,
    Predictor,
    common_tokenizer,
    longest_window,
    match_experts_implementation,
)
from minifloat.compare.options import CompareOptions
from minifloat.compare.result import CandidateResult, Comparison, ModelRecord, TextRecord
from minifloat.compare.scoring_pass import ScoringPass
from minifloat.compare.summary import summarize
from minifloat.compare.tasks import load_tasks
from minifloat.compare.verdict import judge
from minifloat.compare.worst import describe
from minifloat.errors import UsageError
from minifloat.kernels import native, processors
from minifloat.numerics.formats import E4M3
from minifloat.report.progress import Progress
from minifloat.runtime.kv_scales import kv_scales


def compare_models(
    baseline: ModelLike,
    candidates: ModelLike | Sequence[ModelLike],
    data: SourceLike | Sequence[SourceLike] = (),
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Comparison:
    """Measure how far the candidates' predictions are from the baseline's, and judge whether that is near enough.

    A checkpoint that declares FP8 inputs or an FP8 KV cache is run with them, as servers with FP8 hardware run it, so
    that the numbers are those of serving. With `variants` each candidate is run three times where it declares both: as
    it is, without rounding keys and values, and with its weights alone, which is what servers without FP8 hardware
    compute; each run is a candidate of its own.

    All run at the same time and see the same tokens. Mixture-of-experts models run transformers' eager experts on all
    sides if one side's experts are quantized, so that a different order of summation is not taken for a difference of
    the weights.

    Ctrl-C ends the measurement, not the function, once every text has been begun: what is known by then is returned,
    and `Comparison.partial` says so.

    Args:
        baseline: A folder, a model of the hub, or one made by `minifloat.runtime.load.load`.
        candidates: One or several of the same.
        data: Text, as for `calibrate`: paths of files and folders, or names of data sets of the hub, with options after
            a ``#``. By default the two short texts that come with minifloat.
        progress: Called after each batch.
        options: Those of `CompareOptions`.

    Raises:
        UsageError: Two models have different vocabularies, or a text or window cannot be used; or `resume` is a
            folder of another comparison.
        DataError: A text cannot be read or does not exist.
        NonFiniteError: A model's logits are NaN or Inf; says where first.
        CheckpointError: A folder cannot be loaded.
        HubError: The hub has no such model, refuses it, or cannot be reached.
        UnknownNameError: Another dtype.
    """
    return Run(baseline, _listed(candidates), _sources(data), CompareOptions(**options), progress).result()


class Run:
    """A comparison while it is made."""

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
            locate(as_source(source))  # what is not there is said before models are loaded
        tasks = load_tasks(options.tasks, include_path=options.task_path) if options.tasks else None
        self._options, self._progress = options, progress
        self._notes: list[str] = []
        self.baseline = Predictor.of(baseline, options.of_load(), options.revision)
        self.candidates = [run for one in candidates for run in self._runs(one)]
        everyone = (self.baseline, *self.candidates)
        self.tokenizer: PreTrainedTokenizerBase = common_tokenizer(everyone)
        self.window = _window(options.window, longest_window(everyone))
        match_experts_implementation(everyone)
        self.corpus = Corpus(data, self.tokenizer, self.window, options.max_tokens, self.baseline.vocab_size)
        self._examination = ExtraMeasurements(
            self.baseline,
            self.candidates,
            self.corpus,
            self.tokenizer,
            prompts=options.prompts,
            new_tokens=options.new_tokens,
            tasks=tasks,
            task_limit=options.task_limit,
            attribute=options.attribute,
            tolerance=options.tolerance,
            progress=progress,
        )

    def _runs(self, candidate: ModelLike) -> list[Predictor]:
        """A candidate as it is declared, and its variants if they are asked for."""
        options = self._options
        whole = Predictor.of(candidate, options.of_load())
        if isinstance(candidate, PreTrainedModel):
            return [whole]
        new_cache = self._new_cache(whole)
        runs = [whole if new_cache is None else replace(whole, new_cache=new_cache)]
        if not options.variants:
            return runs
        if new_cache is not None:
            runs.append(replace(whole, name=f"{whole.name} (KV cache not rounded)"))
        if whole.quantizes_inputs():
            runs.append(replace(whole, name=f"{whole.name} (weights only)", weight_only=True))
        return runs

    def _new_cache(self, model: Predictor) -> CacheFactory | None:
        """What makes the simulated KV cache of a candidate."""
        wanted = self._options.kv_cache
        with Checkpoint.open(model.folder) as checkpoint:
            scales = kv_scales(checkpoint) if wanted != "none" else None
        if scales is None and wanted != "fp8":
            return None
        try:
            return kv_cache_factory(model.model, scales or {})
        except UsageError as error:
            if wanted == "fp8":
                raise
            self._notes.append(f"{model.name}: keys and values are not rounded: {error}")
            return None

    def result(self) -> Comparison:
        """Measure everything."""
        started = time.perf_counter()
        scoring = ScoringPass(self.baseline, self.candidates, self.corpus)
        if self._options.resume is not None:
            scoring.journal = MeasurementLog(self._options.resume, self._facts(), scoring.worst)
        try:
            scoring.run(self._progress)
        except KeyboardInterrupt:
            if scoring.empty:
                raise
        candidates = [self._candidate(scoring, number) for number in range(len(self.candidates))]
        seconds = time.perf_counter() - started
        if scoring.done == scoring.total:
            candidates = self._examination.of(candidates)
        return Comparison(
            baseline=_record(self.baseline),
            candidates=tuple(candidates),
            window=self.window,
            dtype=self.baseline.dtype,
            texts=tuple(TextRecord(t.name, t.documents, t.tokens, t.sha256) for t in self.corpus.texts),
            tokens_done=scoring.done,
            tokens_total=scoring.total,
            seconds=seconds,
            machine=_machine(),
            command=self._options.command,
            notes=(*self._notes, *self._examination.notes),
        )

    def _candidate(self, scoring: ScoringPass, number: int) -> CandidateResult:
        scores = [scoring.scores(number, text) for text in range(len(self.corpus.texts))]
        vocab_size = self.baseline.vocab_size
        summaries = tuple(
            summarize(text.name, some, len(some) * text.bytes_per_token, text.unit, vocab_size)
            for text, some in zip(self.corpus.texts, scores, strict=True)
        )
        overall = summaries[0]
        if len(summaries) > 1:
            unit = " or ".join(sorted({text.unit for text in self.corpus.texts}))
            nbytes = sum(summary.nbytes for summary in summaries)
            overall = summarize("all texts", concatenate(scores), nbytes, unit, vocab_size)
        everything = (*summaries, overall) if len(summaries) > 1 else summaries
        return CandidateResult(
            model=_record(self.candidates[number]),
            texts=summaries,
            overall=overall,
            verdict=judge(everything, self._options.tolerance),
            worst=tuple(describe(spot, self.corpus, self.tokenizer) for spot in scoring.worst[number].spots()),
        )

    def _facts(self) -> dict[str, Any]:
        """What scores depend on."""
        options = self._options
        return {
            "minifloat": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "models": [_fingerprint(one) for one in (self.baseline, *self.candidates)],
            "texts": [[text.name, text.sha256, text.unit] for text in self.corpus.texts],
            "window": self.window,
            "dtype": self.baseline.dtype,
            "device": str(options.device),
            "impl": options.impl,
        }


def _fingerprint(model: Predictor) -> dict[str, Any]:
    """What tells a folder's weights from others without reading them: names, shapes, sizes and times of change."""
    with Checkpoint.open(model.folder) as checkpoint:
        stats = {name: (checkpoint.path / name).stat() for name in checkpoint.shards}
        return {
            "folder": str(checkpoint.path.resolve()),
            "config": checkpoint.config,
            "shards": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
            "activations": model.activations,
            "kv_cache": model.new_cache is not None,
        }


def _listed(candidates: ModelLike | Sequence[ModelLike]) -> list[ModelLike]:
    if isinstance(candidates, (PreTrainedModel, str, os.PathLike)):
        return [candidates]
    return list(candidates)


def _sources(data: SourceLike | Sequence[SourceLike]) -> list[SourceLike]:
    if isinstance(data, Sequence) and not isinstance(data, str):
        return list(data)
    return [data]


def _window(requested: int | None, longest: int | None) -> int:
    """Tokens per window, BOS included."""
    if requested is None:
        return DEFAULT_WINDOW if longest is None else min(DEFAULT_WINDOW, longest)
    if longest is not None and requested > longest:
        raise UsageError(f"a window of {requested} tokens is longer than the {longest} that the models attend to")
    return requested


def _record(model: Predictor) -> ModelRecord:
    return ModelRecord(model.name, model.nbytes, model.activations, None if model.new_cache is None else E4M3.name)


def _machine() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "minifloat": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processors": processors.available(),
        "threads": torch.get_num_threads(),
        "instruction_set": native.isa() if native.load() is not None else None,
    }
