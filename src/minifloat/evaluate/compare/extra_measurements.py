"""Measurements beside the scores of tokens: greedy continuations, tasks, and attribution to modules.

Each takes as long as the scoring pass or longer, and none depends on another, so an interrupt keeps the results of
those that are complete.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from minifloat.checkpoint.progress import Progress
from minifloat.errors import MinifloatError
from minifloat.evaluate.compare.assembly import judged, model_record
from minifloat.evaluate.compare.attribution import attribute
from minifloat.evaluate.compare.corpus import Corpus
from minifloat.evaluate.compare.generation import Continuations, generate_greedy, greedy_divergence
from minifloat.evaluate.compare.models import Predictor
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.result import CandidateResult
from minifloat.evaluate.compare.scoring_pass import ModelsPass
from minifloat.evaluate.compare.tasks import Tasks
from minifloat.evaluate.compare.verdict import Verdict
from minifloat.model.runtime.tokenizer import end_tokens

#: Tokens of a prompt, taken from the start of a window.
_PROMPT_TOKENS = 32


@dataclass(frozen=True)
class ExtraMeasurements:
    """The measurements of a comparison beside the scores of tokens.

    Attributes:
        tasks: Tasks to run; None: none.
        task_limit: Number of items of each task to run; None: all.
    """

    baseline: Predictor
    candidates: Sequence[Predictor]
    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase
    prompts: int
    new_tokens: int
    tasks: Tasks | None
    task_limit: int | None
    attribution_seconds: float
    tolerance: Tolerance
    progress: Progress | None
    notes: list[str] = field(default_factory=list)

    def add_to(self, results: Sequence[CandidateResult]) -> list[CandidateResult]:
        """Return the results of the candidates with these measurements added; Ctrl-C ends the measuring."""
        extended = list(results)
        with contextlib.suppress(KeyboardInterrupt):
            if self.prompts:
                with self._errors_as_notes("greedy continuations"):
                    self._generate(extended)
            if self.tasks is not None:
                with self._errors_as_notes("tasks"):
                    self._run_tasks(extended, self.tasks)
            if self.attribution_seconds:
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
        prompts = self._prompts()
        if not prompts:
            return
        by_baseline = self._continue(self.baseline, prompts)
        for index, model in enumerate(self.candidates):
            by_candidate = self._continue(model, prompts)
            divergence = greedy_divergence(self.tokenizer, prompts, by_baseline, by_candidate, self.new_tokens)
            results[index] = replace(results[index], generation=divergence)

    def _prompts(self) -> list[list[int]]:
        """Return the first tokens of windows, from all texts in turn."""
        batches = [batch for batch in self.corpus.batches() if batch.ids.shape[1] >= _PROMPT_TOKENS]
        rows = itertools.chain.from_iterable(batch.ids[:, :_PROMPT_TOKENS].tolist() for batch in batches)
        return list(itertools.islice(rows, self.prompts))

    def _continue(self, model: Predictor, prompts: list[list[int]]) -> Continuations:
        with model.set_up():
            return generate_greedy(
                model.model,
                prompts,
                self.new_tokens,
                ends=end_tokens(self.baseline.model.generation_config, self.baseline.model.config),
                cache_factory=model.new_cache,
                progress=self.progress,
            )

    def _run_tasks(self, results: list[CandidateResult], tasks: Tasks) -> None:
        """Run the tasks; their keys and values are not rounded, because lm-evaluation-harness makes its own caches."""
        runs = []
        for index, model in enumerate((self.baseline, *self.candidates)):
            if self.progress is not None:
                self.progress(index, 1 + len(self.candidates), f"tasks of {model.name}")
            with model.set_up():
                runs.append(tasks.run(model.for_tasks(self.tokenizer), self.task_limit))
        for index, run in enumerate(runs[1:]):
            results[index] = replace(results[index], tasks=tasks.compare(runs[0], run))

    def _attribute(self, results: list[CandidateResult]) -> None:
        windows = self._windows()
        for index, model in enumerate(self.candidates):
            attribution = attribute(
                self.baseline,
                model,
                windows,
                tolerance=self.tolerance,
                seconds=self.attribution_seconds,
                progress=self.progress,
                confirm=self._verdict,
            )
            results[index] = replace(results[index], attribution=attribution)

    def _verdict(self, mixture: Predictor) -> Verdict:
        """Return the verdict on a mixture of the models, on all texts."""
        scoring = ModelsPass(self.baseline, [mixture], self.corpus)
        scoring.run(self.progress)
        return judged(scoring, 0, model_record(mixture), self.tokenizer, self.tolerance).verdict

    def _windows(self) -> Tensor:
        """Return the windows of the most frequent length, ``[N, W]``, with the texts interleaved."""
        by_width: dict[int, list[Tensor]] = {}
        for batch in self.corpus.batches():
            by_width.setdefault(batch.ids.shape[1], []).append(batch.ids)
        return torch.cat(max(by_width.values(), key=lambda parts: sum(part.numel() for part in parts)))
