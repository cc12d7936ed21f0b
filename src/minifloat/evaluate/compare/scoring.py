"""The pass that scores every token: each batch of windows goes through all models before the next batch starts.

So several candidates cost one pass of the baseline, and an interrupted run has seen the same tokens with every model.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import os
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minifloat.checkpoint.files import storage_errors, written_whole
from minifloat.checkpoint.progress import Progress
from minifloat.errors import NonFiniteError, StorageError, UsageError
from minifloat.evaluate.compare.corpus import Corpus, WindowBatch
from minifloat.evaluate.compare.metrics import FloatArray, TokenScores, concatenate, score_logits
from minifloat.evaluate.compare.models import EngineModel, Model
from minifloat.evaluate.compare.result import LikelyToken, WorstToken
from minifloat.kernels import threads
from minifloat.kernels.divergence import Choices

if TYPE_CHECKING:
    from minifloat.model.runtime.tokenizer import TextTokenizer

#: Logits of one model that are scored at a time. Those of transformers' code are copied to float32; larger copies would
#: take fresh pages from the system each time.
_SLAB_ELEMENTS = 2**22
#: Positions with the largest KL divergence that are kept of each candidate.
WORST_TOKENS = 20
_LIKELY_TOKENS = 5
_CONTEXT_TOKENS = 48
_SETTINGS_FILE = "comparison.json"
_SECONDS_BETWEEN_PARTS = 5.0
_FIELDS = tuple(field.name for field in dataclasses.fields(TokenScores))


class BatchTokens:
    """The tokens of a batch that are scored, one after the other: all of a window but its first."""

    def __init__(self, batch: WindowBatch) -> None:
        windows, width = batch.ids.shape
        self.targets = batch.ids[:, 1:].flatten()
        self._units = batch.units[:, None].expand(-1, width - 1).flatten()
        self._positions = torch.arange(1, width).repeat(windows)

    def at(self, where: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return targets, units and positions of some tokens."""
        return self.targets[where], self._units[where], self._positions[where]


class ScoringPass(ABC):
    """A pass over a corpus, and its scores so far; `ModelsPass` is that of models that run here."""

    def __init__(self, baseline: Model, candidates: int, corpus: Corpus) -> None:
        self.corpus = corpus
        self.log: MeasurementLog | None = None
        self.baseline = baseline
        self._batches = corpus.batches
        self._parts: list[list[list[TokenScores]]] = [[[] for _ in corpus.texts] for _ in range(candidates)]
        self.worst = [WorstPositions() for _ in range(candidates)]
        self.done, self.total = 0, corpus.tokens

    @property
    def empty(self) -> bool:
        """Whether some text has no score yet."""
        return not all(parts for candidate in self._parts for parts in candidate)

    def scores(self, candidate: int, text: int) -> TokenScores:
        return concatenate(self._parts[candidate][text])

    @torch.inference_mode()
    def run(self, progress: Progress | None = None) -> None:
        """Score all windows of the corpus that the log does not contain."""
        for number, batch in enumerate(self._batches):
            logged = self.log.scores(number) if self.log is not None else None
            scores_by_candidate = self._score(batch) if logged is None else logged
            for parts, scores in zip(self._parts, scores_by_candidate, strict=True):
                parts[batch.text].append(scores)
            self.done += batch.tokens
            if self.log is not None and logged is None:
                self.log.add(number, scores_by_candidate)
            if progress is not None:
                progress(self.done, self.total, self.corpus.texts[batch.text].name)
        if self.log is not None:
            self.log.flush()

    def run_until_interrupted(self, progress: Progress | None = None) -> float:
        """Score until the end or Ctrl-C, which raises only before all texts have scores; return the seconds."""
        started = time.perf_counter()
        try:
            self.run(progress)
        except KeyboardInterrupt:
            if self.empty:
                raise
        return time.perf_counter() - started

    @abstractmethod
    def _score(self, batch: WindowBatch) -> list[TokenScores]:
        """Return the scores of each candidate on a batch."""

    def refuse_nan(self, model: Model, nll: FloatArray) -> None:
        """Raise the NonFiniteError of a model if its scores hold NaN."""
        if np.isnan(nll).any():
            raise first_nan(model, self.corpus)


def first_nan(model: Model, corpus: Corpus) -> NonFiniteError:
    """Return the error that names the first token, in the order of the text, with NaN or Inf logits."""
    for text in corpus.texts:
        for window in text.windows:
            ids = torch.tensor([[*corpus.prefix, *window.ids.tolist()]])
            total = torch.cat([rows.logsumexp(-1) for rows in model.logits(ids)])
            if not bool(total.isfinite().all()):
                token = window.start + int((~total.isfinite()).nonzero()[0]) + 1 - len(corpus.prefix)
                document = f" in document {window.document}" if text.documents > 1 else ""
                return NonFiniteError(
                    f"logits of {model.name}",
                    f"NaN or Inf where token {token}{document} of {text.name} is predicted",
                )
    return NonFiniteError(f"logits of {model.name}", "NaN or Inf, but not when its windows are run alone")


def slabs(elements: int, steps: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Yield the logits ``[R, V]`` of each model, some rows at a time, with the places of their tokens."""
    start = 0
    for logits in steps:
        device, rows = logits[0].device, max(elements // logits[0].shape[1], 1)
        for few in zip(*(torch.split(of_model, rows) for of_model in logits), strict=True):
            yield slice(start, start + len(few[0])), tuple(of_model.to(device) for of_model in few)
            start += len(few[0])


class ModelsPass(ScoringPass):
    def __init__(self, baseline: Model, candidates: Sequence[Model], corpus: Corpus) -> None:
        super().__init__(baseline, len(candidates), corpus)
        self._models = (baseline, *candidates)
        self._workers: list[ThreadPoolExecutor] = []

    def run(self, progress: Progress | None = None) -> None:
        """Score as `ScoringPass.run`; native models run at the same time where each gets as many of the threads."""
        # With half of the threads a model takes less than twice as long, for fewer wait for each other.
        count, models = threads.count(), len(self._models)
        native = all(isinstance(model, EngineModel) and model.record.runner == "native" for model in self._models)
        with ExitStack() as stack:
            if native and count % models == 0:
                stack.callback(threads.set_threads, count)  # also those of threads that begin later
                stack.callback(self._workers.clear)
                make = partial(ThreadPoolExecutor, 1, "minifloat-model", threads.set_threads, (count // models,))
                self._workers = [stack.enter_context(make()) for _ in self._models]
            super().run(progress)

    def _steps(self, ids: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the logits of all models, some rows at a time."""
        each = [model.logits(ids) for model in self._models]
        if not self._workers:
            yield from zip(*each, strict=True)
            return
        while True:
            futures = [worker.submit(next, step, None) for worker, step in zip(self._workers, each, strict=True)]
            logits = tuple(found for future in futures if (found := future.result()) is not None)
            if not logits:
                return
            yield logits

    def drop_candidates(self) -> None:
        """Drop the candidates themselves, whose scores stay."""
        self._models = self._models[:1]

    def _score(self, batch: WindowBatch) -> list[TokenScores]:
        tokens, parts = BatchTokens(batch), [list[TokenScores]() for _ in self._models[1:]]
        for where, (baseline, *others) in slabs(_SLAB_ELEMENTS, self._steps(batch.ids)):
            for candidate, logits in enumerate(others):
                scores, p, q = score_logits(baseline, logits, *tokens.at(where))
                self.refuse_nan(self._models[0], scores.baseline_nll)
                self.refuse_nan(self._models[candidate + 1], scores.candidate_nll)
                self.worst[candidate].add(scores, p, q, batch, where.start)
                parts[candidate].append(scores)
        return [concatenate(of_candidate) for of_candidate in parts]


@dataclass(frozen=True)
class ScoredPosition:
    """A token of the corpus, and the tokens that both models expected there."""

    kl: float
    text: int
    window: int
    column: int
    baseline: tuple[tuple[int, float], ...]
    candidate: tuple[tuple[int, float], ...]

    @property
    def place(self) -> tuple[int, int, int]:
        return self.text, self.window, self.column


class WorstPositions:
    """The `WORST_TOKENS` positions with the largest KL divergence of all that were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ScoredPosition]] = []
        self._numbers = itertools.count()

    def offer(self, positions: Iterable[ScoredPosition]) -> None:
        """Add positions, and drop all but the worst; a position that is already here is not added again."""
        places = {position.place for _, _, position in self._heap}
        for position in positions:
            if position.place in places:
                continue
            places.add(position.place)
            heapq.heappush(self._heap, (position.kl, -next(self._numbers), position))
            if len(self._heap) > WORST_TOKENS:
                heapq.heappop(self._heap)

    def add(self, scores: TokenScores, p: Choices, q: Choices, batch: WindowBatch, first: int) -> None:
        bound = self._heap[0][0] if len(self._heap) == WORST_TOKENS else 0.0
        rows = (scores.kl > bound).nonzero()[0]
        width = batch.ids.shape[1] - 1
        for row in sorted(rows, key=lambda row: -scores.kl[row])[:WORST_TOKENS]:
            window, column = divmod(first + int(row), width)
            tokens = (_likely_tokens(p, int(row)), _likely_tokens(q, int(row)))
            self.offer([ScoredPosition(float(scores.kl[row]), batch.text, batch.windows[window], column + 1, *tokens)])

    def ranked(self) -> list[ScoredPosition]:
        return [position for _, _, position in sorted(self._heap, reverse=True)]


def _likely_tokens(choices: Choices, row: int) -> tuple[tuple[int, float], ...]:
    probabilities = choices.top_log_probabilities()[row].exp()
    pairs = zip(choices.top[row].tolist(), probabilities.tolist(), strict=True)
    return tuple(itertools.islice(pairs, _LIKELY_TOKENS))


def to_worst_token(position: ScoredPosition, corpus: Corpus, tokenizer: TextTokenizer) -> WorstToken:
    text = corpus.texts[position.text]
    window = text.windows[position.window]
    column = position.column - len(corpus.prefix)
    context = window.ids[max(column - _CONTEXT_TOKENS, 0) : column].tolist()

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def likely_tokens(pairs: tuple[tuple[int, float], ...]) -> tuple[LikelyToken, ...]:
        return tuple(LikelyToken(decode([token]), probability) for token, probability in pairs)

    return WorstToken(
        text=text.name,
        document=window.document,
        position=window.start + column,
        context=decode(context),
        token=decode([int(window.ids[column])]),
        kl=position.kl,
        baseline=likely_tokens(position.baseline),
        candidate=likely_tokens(position.candidate),
    )


class MeasurementLog:
    """The scores of batches, by number of the batch, in a folder."""

    def __init__(
        self, folder: str | os.PathLike[str], settings: dict[str, Any], worst: Sequence[WorstPositions]
    ) -> None:
        self._folder = Path(folder)
        self._logged: dict[int, list[TokenScores]] = {}
        self._unwritten: dict[int, list[TokenScores]] = {}
        self._worst = worst
        self._last_write = time.monotonic()
        with storage_errors(self._folder, "use it"):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._check_settings({**settings, "scores": list(_FIELDS)})
            for path in sorted(self._folder.glob("part-*.npz")):
                self._read(path, len(worst))

    def scores(self, batch: int) -> list[TokenScores] | None:
        return self._logged.get(batch)

    def add(self, batch: int, scores: list[TokenScores]) -> None:
        """Add the scores of each candidate on a batch; they are on disk within seconds."""
        self._unwritten[batch] = scores
        if time.monotonic() - self._last_write > _SECONDS_BETWEEN_PARTS:
            self.flush()

    def flush(self) -> None:
        """Write all scores that are not on disk yet, with the worst positions so far, as one part."""
        if not self._unwritten:
            return
        arrays: dict[str, npt.NDArray[Any]] = {
            f"{batch}/{candidate}/{field}": getattr(scores, field)
            for batch, candidates in self._unwritten.items()
            for candidate, scores in enumerate(candidates)
            for field in _FIELDS
        }
        positions = [[dataclasses.asdict(position) for position in worst.ranked()] for worst in self._worst]
        arrays["worst"] = np.frombuffer(json.dumps(positions).encode(), dtype=np.uint8)
        with written_whole(self._folder / f"part-{min(self._unwritten):08d}.npz") as file:
            np.savez(file, allow_pickle=False, **arrays)
        self._unwritten, self._last_write = {}, time.monotonic()

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = self._folder / _SETTINGS_FILE
        text = json.dumps(settings, indent=1, sort_keys=True)
        if path.exists():
            if path.read_text(encoding="utf-8") != text:
                raise UsageError(
                    f"{self._folder} holds scores of other models, texts or settings (see {path.name} in it): "
                    "give another folder, or delete this one"
                )
            return
        if any(self._folder.iterdir()):
            raise UsageError(
                f"{self._folder} is neither empty nor the folder of an earlier comparison: give another folder"
            )
        with written_whole(path) as file:
            file.write(text.encode())

    def _read(self, path: Path, num_candidates: int) -> None:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                for batch in sorted({int(name.partition("/")[0]) for name in arrays.files if "/" in name}):
                    self._logged[batch] = [
                        TokenScores(**{field: arrays[f"{batch}/{candidate}/{field}"] for field in _FIELDS})
                        for candidate in range(num_candidates)
                    ]
                positions = json.loads(arrays["worst"].tobytes())
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise StorageError(
                f"{path}: expected scores of a comparison, found a damaged file ({error}); delete it"
            ) from error
        for worst, of_candidate in zip(self._worst, positions, strict=True):
            for values in of_candidate:
                for side in ("baseline", "candidate"):
                    values[side] = tuple((int(token), float(probability)) for token, probability in values[side])
            worst.offer(ScoredPosition(**values) for values in of_candidate)
