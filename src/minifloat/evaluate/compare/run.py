"""`compare_models`: run models over the same text, compare their predictions, and judge the difference."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from minifloat._version import __version__
from minifloat.calibration.data import SourceLike, as_source
from minifloat.calibration.readers import locate
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder
from minifloat.checkpoint.layout import is_gguf
from minifloat.checkpoint.progress import Progress
from minifloat.engine import EngineOptions
from minifloat.errors import MinifloatError, UsageError
from minifloat.evaluate.compare.behavior import Behavior
from minifloat.evaluate.compare.corpus import DEFAULT_WINDOW, Corpus
from minifloat.evaluate.compare.generation import greedy_divergence
from minifloat.evaluate.compare.memory import RecordedModel, fits_together, prompts_of
from minifloat.evaluate.compare.metrics import concatenate
from minifloat.evaluate.compare.models import EngineModel, Model, ModelLike, ModelRecord, common_tokenizer, is_named
from minifloat.evaluate.compare.options import CompareOptions, ScoringOptions, Tolerance
from minifloat.evaluate.compare.result import CandidateResult, Comparison, TextRecord
from minifloat.evaluate.compare.scoring import MeasurementLog, ModelsPass, ScoringPass, to_worst_token
from minifloat.evaluate.compare.summary import summarize
from minifloat.evaluate.compare.tasks import Tasks
from minifloat.evaluate.compare.verdict import LEAST_KL, MEAN_KL, Verdict, judge
from minifloat.kernels import native, processors
from minifloat.model.layouts import describe
from minifloat.model.layouts.gguf import require_package
from minifloat.model.runtime.tensors import StoredTensors
from minifloat.model.runtime.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from minifloat.evaluate.compare.behavior_prompts import Prompts
    from minifloat.model.runtime.tokenizer import TextTokenizer

#: Tokens of a prompt, taken from the start of a window.
_PROMPT_TOKENS = 32
_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")

#: Windows up to this many tokens fit into the engine's default KV cache.
_SHORT_WINDOW = 2048
#: Sequences that an engine runs at a time.
_SEQUENCES = 32


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

    All models run at the same time, or one after the other where they do not fit into memory together. They run in
    minifloat's engine where its decoders cover them all, else by transformers' code
    (`minifloat.evaluate.compare.models` says when).

    After at least one batch of every text, Ctrl-C makes the function return the results so far (`Comparison.partial`).

    Args:
        baseline: A folder, a model of the hub, or a model from `minifloat.model.runtime.load.load`.
        candidates: One or several models, given like the baseline; or GGUF files of it.
        data: Text, as for `calibrate`: paths of files and folders, or names of data sets of the hub, with options after
            a ``#``. By default the two short texts that come with minifloat.
        options: How the models run, and what is measured; None: `CompareOptions()`.
        progress: Called before the models are loaded, with the memory that they take, and after each batch with tokens
            done, tokens in total, and the name of the text.

    Raises:
        UsageError: If two models have different vocabularies, if a text or window cannot be used, or if `resume` is a
            folder of another comparison.
        DataError: If a text does not exist or cannot be read.
        NonFiniteError: If a model's logits are NaN or Inf; the message names the first such token.
        CheckpointError: If a folder cannot be loaded.
        HubError: If the hub does not have the model, refuses it, or cannot be reached.
        UnknownNameError: If a task is not a valid name.
    """
    options = options or CompareOptions()
    candidates = (
        list(candidates) if isinstance(candidates, Sequence) and not isinstance(candidates, str) else [candidates]
    )
    if not candidates:
        raise UsageError("no model to compare with the baseline")
    if options.resume is not None and not all(map(is_named, (baseline, *candidates))):
        raise UsageError("resume needs folders: a loaded model may have been changed since")
    sources = as_sources(data)
    tasks = Tasks(options.tasks, options.task_path) if options.tasks else None
    prompts = read_prompts(options)
    notes: list[str] = []
    with opened(baseline, candidates, options) as checkpoints:
        known = [checkpoint for checkpoint in checkpoints if checkpoint is not None]
        if len(known) == len(checkpoints) and not fits_together(known, options.device, progress):
            names = [str(model) for model in (baseline, *candidates)]
            return _OneAtATime(names, known, sources, options, prompts, notes, progress).run()
        models = open_models(baseline, candidates, options, notes, checkpoints)
    tokenizer = common_tokenizer(models)
    corpus = cut_text(sources, models, tokenizer, options)
    behaviors = _behaviors(models, prompts, progress, notes)
    scoring = ModelsPass(models[0], models[1:], corpus)
    if options.resume is not None:
        scoring.log = MeasurementLog(options.resume, _settings(models, corpus, options), scoring.worst)
    seconds = scoring.run_until_interrupted(progress)
    records = [model.record for model in models]
    results = [
        judged(scoring, index, record, tokenizer, options.tolerance, behaviors[index])
        for index, record in enumerate(records[1:])
    ]
    if scoring.done == scoring.total:
        extra = _ExtraMeasurements(models, (baseline, *candidates), corpus, tokenizer, options, progress, notes)
        results = extra.add_to(results, tasks)
    return assembled(scoring, records[0], results, seconds=seconds, command=options.command, notes=notes)


def read_prompts(options: ScoringOptions) -> Prompts | None:
    """Read the prompts of `behavior`; None if it is not asked for."""
    if options.behavior is None:
        return None
    try:
        from minifloat.evaluate.compare.behavior_prompts import Prompts
    except ImportError as error:
        raise UsageError(f"--behavior needs pip install 'minifloat[serve]' ({error})") from error
    return Prompts.read(options.behavior, options.behavior_tokens)


def _behaviors(
    models: Sequence[Model], prompts: Prompts | None, progress: Progress | None, notes: list[str]
) -> list[Behavior | None]:
    if prompts is None:
        return [None] * (len(models) - 1)
    from minifloat.evaluate.compare.behavior_answers import behaviors

    return behaviors(models, prompts, progress, notes)


def as_sources(data: SourceLike | Sequence[SourceLike]) -> list[SourceLike]:
    """Return one or several sources of text as a list; a missing one is an error before models are loaded."""
    sources = list(data) if isinstance(data, Sequence) and not isinstance(data, str) else [data]
    for source in sources:
        locate(as_source(source))
    return sources


def cut_text(
    sources: Sequence[SourceLike],
    models: Sequence[Model],
    tokenizer: TextTokenizer,
    options: ScoringOptions,
    longest: int | None = None,
) -> Corpus:
    """Return the windows, which are no longer than all models, and a server of `longest` tokens, attend to."""
    known = [length for length in (*(model.longest for model in models), longest) if length is not None]
    longest, window = min(known, default=None), options.window
    if window is not None and longest is not None and window > longest:
        raise UsageError(f"a window of {window} tokens is longer than the {longest} that the models attend to")
    window = window or min(DEFAULT_WINDOW, longest or DEFAULT_WINDOW)
    for model in models:
        model.check_window(window)
    return Corpus(sources, tokenizer, window, options.max_tokens, models[0].vocab_size)


def _settings(models: Sequence[Model], corpus: Corpus, options: CompareOptions) -> dict[str, Any]:
    return {
        "minifloat": __version__,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "models": [_fingerprint(model) for model in models],
        "texts": [[text.name, text.sha256, text.unit] for text in corpus.texts],
        "window": corpus.window,
        "dtype": models[0].dtype,
        "device": options.device,
        "impl": options.impl,
    }


def _fingerprint(model: Model) -> dict[str, Any]:
    """Identify a folder's weights without reading them: by path, config, and the shards' sizes and times of change."""
    checkpoint = model.headers()
    stats = {name: checkpoint.shard_path(name).stat() for name in checkpoint.shards}
    return {
        "folder": str(checkpoint.path.resolve()),
        "config": checkpoint.config,
        "shards": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        **dataclasses.asdict(model.record),
    }


def judged(
    scoring: ScoringPass,
    index: int,
    record: ModelRecord,
    tokenizer: TextTokenizer,
    tolerance: Tolerance,
    behavior: Behavior | None = None,
) -> CandidateResult:
    corpus, vocab_size = scoring.corpus, scoring.baseline.vocab_size
    scores_by_text = [scoring.scores(index, text) for text in range(len(corpus.texts))]
    summaries = tuple(
        summarize(text.name, scores, len(scores) * text.bytes_per_token, [(len(scores), text.unit)], vocab_size)
        for text, scores in zip(corpus.texts, scores_by_text, strict=True)
    )
    overall = summaries[0]
    if len(summaries) > 1:
        units = [(len(scores), text.unit) for text, scores in zip(corpus.texts, scores_by_text, strict=True)]
        nbytes = sum(summary.nbytes for summary in summaries)
        overall = summarize("all texts", concatenate(scores_by_text), nbytes, units, vocab_size)
    return CandidateResult(
        model=record,
        texts=summaries,
        overall=overall,
        verdict=judge(
            (*summaries, overall) if len(summaries) > 1 else summaries,
            tolerance,
            kl=MEAN_KL if record.served is None else LEAST_KL,
            behavior=behavior,
        ),
        worst=tuple(to_worst_token(position, corpus, tokenizer) for position in scoring.worst[index].ranked()),
        behavior=behavior,
    )


def assembled(
    scoring: ScoringPass,
    baseline: ModelRecord,
    candidates: Sequence[CandidateResult],
    *,
    seconds: float,
    command: str,
    notes: Sequence[str],
) -> Comparison:
    """Return the result of a comparison; arguments as the attributes of `Comparison`."""
    return Comparison(
        baseline=baseline,
        candidates=tuple(candidates),
        window=scoring.corpus.window,
        dtype=scoring.baseline.dtype,
        texts=tuple(TextRecord(t.name, t.documents, t.tokens, t.sha256) for t in scoring.corpus.texts),
        tokens_done=scoring.done,
        tokens_total=scoring.total,
        seconds=seconds,
        machine=_machine(),
        command=command,
        notes=tuple(notes),
    )


def _machine() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "minifloat": __version__,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "processors": processors.available(),
        "threads": torch.get_num_threads(),
        "instruction_set": native.isa() if native.load() is not None else None,
    }


@contextlib.contextmanager
def opened(
    baseline: ModelLike, candidates: Sequence[ModelLike], options: CompareOptions
) -> Iterator[list[Checkpoint | None]]:
    """Open the checkpoint of each model; None for one that is loaded. A GGUF file gets the config of the baseline."""
    with ExitStack() as stack:
        checkpoints: list[Checkpoint | None] = []
        for at, model in enumerate((baseline, *candidates)):
            checkpoint = None
            if is_named(model) and at and is_gguf(os.fspath(model)):
                checkpoint = _open_gguf(model, checkpoints[0])
            elif is_named(model):
                checkpoint = Checkpoint.open(model_folder(model, revision=None if at else options.revision))
            checkpoints.append(checkpoint if checkpoint is None else stack.enter_context(checkpoint))
        yield checkpoints


def _open_gguf(file: str | os.PathLike[str], baseline: Checkpoint | None) -> Checkpoint:
    if baseline is None:
        raise UsageError(f"{file}: a GGUF file is compared with a model folder, whose config says how it runs")
    require_package()
    from minifloat.model.layouts.gguf.reading import GgufCheckpoint

    return GgufCheckpoint(Path(file), baseline)


def open_models(
    baseline: ModelLike,
    candidates: Sequence[ModelLike],
    options: CompareOptions,
    notes: list[str],
    checkpoints: Sequence[Checkpoint | None],
) -> list[Model]:
    """Return the baseline, then each candidate as declared and, if the options request them, its other variants."""
    known = [checkpoint for checkpoint in checkpoints if checkpoint is not None]
    reason = "a model is loaded already" if len(known) < len(checkpoints) else _why_no_engine(known, options)

    def opened_by(engine: bool) -> list[Model]:
        if not engine:
            from minifloat.evaluate.compare.in_transformers import open_in_transformers

            return [*open_in_transformers(baseline, candidates, options, notes, checkpoints)]
        with _refusals_of_engines():
            return _in_engines([str(model) for model in (baseline, *candidates)], known, options)

    return _by_engine_or_transformers(reason, opened_by, options)


class _NoEngineError(Exception):
    """The engine does not run a model; the message says why."""


@contextlib.contextmanager
def _refusals_of_engines() -> Iterator[None]:
    """Turn a UsageError of an engine that is opened into the reason for running transformers' code."""
    try:
        yield
    except UsageError as error:  # if it is about the options, transformers' way ends with it too
        raise _NoEngineError(str(error)) from error


def _by_engine_or_transformers(reason: str, run: Callable[[bool], _Result], options: CompareOptions) -> _Result:
    """Return what `run` gives with engines, or without where there is a reason, or where an engine refuses a model."""
    if not reason:
        try:
            return run(True)
        except _NoEngineError as error:
            reason = str(error)
    if options.behavior is not None:
        raise UsageError(
            f"--behavior: only minifloat's engine answers as `serve` does, and it does not run these models: {reason}; "
            "leave the option out, or add --weight-only if a checkpoint declares quantized inputs"
        )
    _LOG.info("transformers' code runs the models: %s", reason)
    return run(False)


def _why_no_engine(checkpoints: Sequence[Checkpoint], options: CompareOptions) -> str:
    if native.load() is None and options.device == "cpu":
        return "the kernels of this processor are missing"
    for checkpoint in checkpoints:
        if describe(checkpoint).quantizes_inputs and not options.weight_only:
            return f"{checkpoint.path} declares quantized inputs"
    return ""


def _in_engines(names: Sequence[str], checkpoints: Sequence[Checkpoint], options: CompareOptions) -> list[Model]:
    models: list[Model] = [EngineModel(names[0], checkpoints[0], _unrounded(checkpoints[0], options))]
    for name, checkpoint in list(zip(names, checkpoints, strict=True))[1:]:
        models += _candidate_in_engine(name, checkpoint, options)
    return models


def _unrounded(checkpoint: Checkpoint, options: CompareOptions) -> EngineOptions:
    """Return the options of an engine that rounds neither keys and values nor the output layer."""
    is_long = options.window is not None and options.window > _SHORT_WINDOW
    return EngineOptions(
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.window if is_long else None,
        max_num_seqs=_SEQUENCES,
        activations="bf16",
        lm_head="bf16",
        task="generate",
        runner="native" if options.device == "cpu" else "device",
        impl=options.impl,
        kv_cache_dtype=_plain_cache(checkpoint, options),
    )


def _candidate_in_engine(name: str, checkpoint: Checkpoint, options: CompareOptions) -> list[Model]:
    """Return a candidate as declared and, if the options request it, without rounded keys and values."""
    unrounded = replace(_unrounded(checkpoint, options), lm_head=options.lm_head, activations=options.activations)
    cache = unrounded.kv_cache_dtype if options.kv_cache == "none" else options.kv_cache
    models: list[Model] = [EngineModel(name, checkpoint, replace(unrounded, kv_cache_dtype=cache))]
    if options.variants and models[-1].record.kv_cache is not None:
        models.append(EngineModel(f"{name} (KV cache not rounded)", checkpoint, unrounded))
    return models


def _plain_cache(checkpoint: Checkpoint, options: CompareOptions) -> Literal["float32", "bfloat16"]:
    """Return the dtype of a KV cache that does not round keys and values of a model."""
    if options.dtype is not None:
        return "float32" if options.dtype == "float32" else "bfloat16"
    dtype = StoredTensors(checkpoint, describe(checkpoint)).dtype()
    return "float32" if dtype == torch.float32 else "bfloat16"


@dataclass
class _OneAtATime:
    """A comparison of models that do not fit into memory together: the baseline's logits are written down first."""

    names: list[str]
    checkpoints: list[Checkpoint]
    sources: Sequence[SourceLike]
    options: CompareOptions
    prompts: Prompts | None
    notes: list[str]
    progress: Progress | None

    def run(self) -> Comparison:
        wanted = {"--variants": self.options.variants, "--tasks": self.options.tasks, "--resume": self.options.resume}
        wanted["--attribute"] = self.options.attribute
        for name in (name for name, given in wanted.items() if given):
            raise UsageError(f"{name} needs all models in memory at once, where they do not fit: leave it out")
        return _by_engine_or_transformers(_why_no_engine(self.checkpoints, self.options), self._run, self.options)

    def _run(self, in_engine: bool) -> Comparison:
        started, results = time.perf_counter(), []
        with tempfile.TemporaryDirectory(prefix="minifloat-compare-") as folder:
            baseline, corpus, tokenizer = self._record_baseline(Path(folder), in_engine)
            for number in range(1, len(self.names)):
                scoring, result = self._score(number, baseline, corpus, tokenizer, in_engine)
                results.append(result)
                if scoring.done < scoring.total:  # interrupted
                    break
        seconds = time.perf_counter() - started
        notes = [*self.notes, "the models do not fit into memory together, and ran one after the other"]
        return assembled(scoring, baseline.record, results, seconds=seconds, command=self.options.command, notes=notes)

    def _score(
        self,
        number: int,
        baseline: RecordedModel,
        corpus: Corpus,
        tokenizer: TextTokenizer,
        in_engine: bool,
    ) -> tuple[ModelsPass, CandidateResult]:
        """Return the pass of a candidate without its model, which is not in memory afterwards, and the result."""
        models = [baseline, self._open(number, in_engine)]
        common_tokenizer(models)
        (behavior,) = _behaviors(models, self.prompts, self.progress, self.notes)
        scoring = ModelsPass(baseline, models[1:], corpus)
        scoring.run_until_interrupted(self.progress)
        result = judged(scoring, 0, models[1].record, tokenizer, self.options.tolerance, behavior)
        if scoring.done == scoring.total:
            sources = [self.names[0], self.names[number]]
            extra = _ExtraMeasurements(models, sources, corpus, tokenizer, self.options, self.progress, self.notes)
            [result] = extra.add_to([result], None)
        scoring.drop_candidates()
        return scoring, result

    def _record_baseline(self, folder: Path, in_engine: bool) -> tuple[RecordedModel, Corpus, TextTokenizer]:
        model = self._open(0, in_engine)
        tokenizer = common_tokenizer([model])
        corpus = cut_text(self.sources, [model], tokenizer, self.options)
        recorded = RecordedModel(model, folder)
        if self.prompts is not None:
            from minifloat.evaluate.compare.behavior_answers import answers_of

            recorded.answers = answers_of(model, self.prompts, self.progress)
        recorded.write(model, corpus, self.progress)
        prompts = prompts_of(corpus, self.options.prompts, _PROMPT_TOKENS)
        if prompts:
            recorded.answer(model, prompts, self.options.new_tokens, self.progress)
        return recorded, corpus, tokenizer

    def _open(self, number: int, in_engine: bool) -> Model:
        name, checkpoint, options = self.names[number], self.checkpoints[number], self.options
        if in_engine:
            with _refusals_of_engines():
                if number:
                    return _candidate_in_engine(name, checkpoint, options)[0]
                return EngineModel(name, checkpoint, _unrounded(checkpoint, options))
        from minifloat.evaluate.compare import in_transformers

        if number:
            return in_transformers.candidate_in_transformers(name, checkpoint, options, self.notes)[0]
        return in_transformers.baseline_in_transformers(name, checkpoint, options)


@dataclass
class _ExtraMeasurements:
    models: list[Model]
    sources: Sequence[ModelLike]
    corpus: Corpus
    tokenizer: TextTokenizer
    options: CompareOptions
    progress: Progress | None
    notes: list[str]

    def add_to(self, results: Sequence[CandidateResult], tasks: Tasks | None) -> list[CandidateResult]:
        """Return the results of the candidates with these measurements added; Ctrl-C ends the measuring."""
        extended = list(results)
        with contextlib.suppress(KeyboardInterrupt):
            if self.options.prompts:
                with self._errors_as_notes("greedy continuations"):
                    self._generate(extended)
            if tasks is not None:
                with self._errors_as_notes("tasks"):
                    self._run_tasks(extended, tasks)
            if self.options.attribute:
                with self._errors_as_notes("the damage of modules"):
                    self._attribute(extended)
        return extended

    @contextlib.contextmanager
    def _errors_as_notes(self, measurement: str) -> Iterator[None]:
        """Record an error of a measurement as a note, so that the results measured so far are kept."""
        try:
            yield
        except MinifloatError as error:
            self.notes.append(f"{measurement}: {error}")

    def _generate(self, results: list[CandidateResult]) -> None:
        prompts = prompts_of(self.corpus, self.options.prompts, _PROMPT_TOKENS)
        length = self.options.new_tokens
        if not prompts:
            return
        by_model = [model.generate(prompts, length, self.progress) for model in self.models]
        for index, by_candidate in enumerate(by_model[1:]):
            divergence = greedy_divergence(self.tokenizer, prompts, by_model[0], by_candidate, length)
            results[index] = replace(results[index], generation=divergence)

    def _run_tasks(self, results: list[CandidateResult], tasks: Tasks) -> None:
        runs, tokenizer = [], load_tokenizer(self.models[0].folder)  # the harness takes no other
        for index, model in enumerate(self.models):
            if self.progress is not None:
                self.progress(index, len(self.models), f"tasks of {model.name}")
            runs.append(tasks.run(model, tokenizer, self.options.task_limit))
        for index, run in enumerate(runs[1:]):
            results[index] = replace(results[index], tasks=tasks.compare(runs[0], run))

    def _attribute(self, results: list[CandidateResult]) -> None:
        from minifloat.evaluate.compare.attribution import attribute
        from minifloat.evaluate.compare.in_transformers import open_in_transformers
        from minifloat.evaluate.compare.transformers_model import TransformersModel

        models = [model for model in self.models if isinstance(model, TransformersModel)]
        if not models:
            self.models.clear()  # to free the engines
            models = open_in_transformers(self.sources[0], self.sources[1:], self.options, self.notes)
        baseline, *candidates = models
        for index, model in enumerate(candidates):
            attribution = attribute(
                baseline,
                model,
                self._windows(),
                tolerance=self.options.tolerance,
                seconds=self.options.attribute,
                progress=self.progress,
                confirm=functools.partial(self._verdict, baseline),
            )
            results[index] = replace(results[index], attribution=attribution)

    def _verdict(self, baseline: Model, mixture: Model) -> Verdict:
        scoring = ModelsPass(baseline, [mixture], self.corpus)
        scoring.run(self.progress)
        return judged(scoring, 0, mixture.record, self.tokenizer, self.options.tolerance).verdict

    def _windows(self) -> Tensor:
        """Return the windows of the most frequent length, ``[N, W]``, with the texts interleaved."""
        by_width: dict[int, list[Tensor]] = {}
        for batch in self.corpus.batches:
            by_width.setdefault(batch.ids.shape[1], []).append(batch.ids)
        return torch.cat(max(by_width.values(), key=lambda parts: sum(part.numel() for part in parts)))
