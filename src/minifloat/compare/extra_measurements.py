"""What is measured beside the scores of tokens: continuations, tasks, and which modules do the damage.

Each takes as long as scoring or longer, and none depends on another: an interruption leaves what is done.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from minifloat.compare.attribution import attribute
from minifloat.compare.corpus import Corpus
from minifloat.compare.generation import Continuations, end_tokens, generate_greedy, greedy_divergence
from minifloat.compare.models import Predictor
from minifloat.compare.result import CandidateResult
from minifloat.compare.tasks import LoadedTasks, TaskRun, compare_tasks, run_tasks
from minifloat.compare.verdict import Tolerance
from minifloat.errors import MinifloatError
from minifloat.report.progress import Progress

#: Tokens of a document that are continued.
_PROMPT_TOKENS = 32


@dataclass(frozen=True)
class ExtraMeasurements:
    """The other measurements of a comparison.

    Attributes:
        baseline: The model that the others are held against.
        candidates: At least one.
        corpus: Where prompts and windows are taken from.
        tokenizer: Of all models.
        prompts: So many beginnings of windows are continued; 0: none.
        new_tokens: Tokens of a continuation at most.
        tasks: What to run; None: nothing.
        task_limit: Items of each task; None: all.
        attribute: Seconds to spend on the damage that modules do, for each candidate; 0: none.
        tolerance: What a suggestion has to reach.
        progress: Called by each of them.
        notes: What could not be measured, and why.
    """

    baseline: Predictor
    candidates: Sequence[Predictor]
    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase
    prompts: int
    new_tokens: int
    tasks: LoadedTasks | None
    task_limit: int | None
    attribute: float
    tolerance: Tolerance
    progress: Progress | None
    notes: list[str] = field(default_factory=list)

    def of(self, results: Sequence[CandidateResult]) -> list[CandidateResult]:
        """The results of the candidates with what was measured besides; Ctrl-C ends the measuring."""
        whole = list(results)
        with contextlib.suppress(KeyboardInterrupt):
            if self.prompts:
                with self._noting("greedy continuations"):
                    self._generate(whole)
            if self.tasks is not None:
                with self._noting("tasks"):
                    self._run_tasks(whole, self.tasks)
            if self.attribute:
                with self._noting("the damage of modules"):
                    self._attribute(whole)
        return whole

    @contextlib.contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Let what was measured before not be lost to something that cannot be."""
        try:
            yield
        except MinifloatError as error:
            self.notes.append(f"{what}: {error}")

    def _generate(self, results: list[CandidateResult]) -> None:
        prompts = self._prompts()
        if not prompts:
            return
        before = self._continue(self.baseline, prompts)
        for number, model in enumerate(self.candidates):
            after = self._continue(model, prompts)
            found = greedy_divergence(self.tokenizer, prompts, before, after, self.new_tokens)
            results[number] = replace(results[number], generation=found)

    def _prompts(self) -> list[list[int]]:
        """The beginnings of windows, of all texts in turn."""
        batches = [batch for batch in self.corpus.batches() if batch.ids.shape[1] >= _PROMPT_TOKENS]
        rows = itertools.chain.from_iterable(batch.ids[:, :_PROMPT_TOKENS].tolist() for batch in batches)
        return list(itertools.islice(rows, self.prompts))

    def _continue(self, model: Predictor, prompts: list[list[int]]) -> Continuations:
        with model.set_up():
            return generate_greedy(
                model.model,
                prompts,
                self.new_tokens,
                ends=end_tokens(self.baseline.model),
                cache_factory=model.new_cache,
                progress=self.progress,
            )

    def _run_tasks(self, results: list[CandidateResult], tasks: LoadedTasks) -> None:
        """The harness makes its own caches: keys and values are not rounded here."""

        def run(model: Predictor) -> TaskRun:
            with model.set_up():
                return run_tasks(model.model, self.tokenizer, tasks, limit=self.task_limit, progress=self.progress)

        before = run(self.baseline)
        for number, model in enumerate(self.candidates):
            results[number] = replace(results[number], tasks=compare_tasks(before, run(model)))

    def _attribute(self, results: list[CandidateResult]) -> None:
        windows = self._windows()
        for number, model in enumerate(self.candidates):
            damage = attribute(
                self.baseline,
                model,
                windows,
                tolerance=self.tolerance,
                seconds=self.attribute,
                progress=self.progress,
            )
            results[number] = replace(results[number], attribution=damage)

    def _windows(self) -> Tensor:
        """Those of the most frequent length, ``[N, W]``, all texts among each other."""
        by_width: dict[int, list[Tensor]] = {}
        for batch in self.corpus.batches():
            by_width.setdefault(batch.ids.shape[1], []).append(batch.ids)
        return torch.cat(max(by_width.values(), key=lambda parts: sum(part.numel() for part in parts)))
