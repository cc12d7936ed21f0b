"""The pass that scores every token: each batch of windows goes through all models before the next batch starts.

Several candidates therefore cost one pass of the baseline, only a few numbers per token are kept, and an interrupted
run has seen the same tokens with every model. `minifloat.evaluate.compare.measurements` can write the scores down
during the pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from minifloat.checkpoint.progress import Progress
from minifloat.errors import NonFiniteError
from minifloat.evaluate.compare.corpus import Corpus, WindowBatch
from minifloat.evaluate.compare.measurements import MeasurementLog
from minifloat.evaluate.compare.metrics import Distribution, FloatArray, TokenScores, concatenate, score_tokens
from minifloat.evaluate.compare.models import Predictor
from minifloat.evaluate.compare.worst import WorstPositions

#: Logits of one model that are held in float64 at a time: so few that they stay in the processor's caches.
_SLAB_ELEMENTS = 2**18


class BatchTokens:
    """The tokens of a batch that are scored, one after the other: all of a window but its first.

    Attributes:
        targets: ``[T]``: the token ids.
    """

    def __init__(self, batch: WindowBatch) -> None:
        windows, width = batch.ids.shape
        self.targets = batch.ids[:, 1:].flatten()
        self._units = batch.units[:, None].expand(-1, width - 1).flatten()
        self._positions = torch.arange(1, width).repeat(windows)

    def score(self, p: Distribution, q: Distribution, where: slice) -> TokenScores:
        """Score some of the tokens, given the distributions of the baseline and of a candidate."""
        return score_tokens(p, q, self.targets[where], self._units[where], self._positions[where])


class ScoringPass(ABC):
    """A pass over a corpus, and its scores so far; `ModelsPass` is that of loaded models.

    Args:
        baseline: The model that the candidates are compared with.
        candidates: Number of candidates, at least 1.
        corpus: The windows.

    Attributes:
        baseline: As the argument.
        corpus: As the argument.
        log: Scores of an earlier run, and the place to write new scores to; None: scores are not written down.
        worst: For each candidate, the positions at which it differs most from the baseline.
        done: Tokens of text that all models have seen.
        total: Tokens of text in all windows.
    """

    def __init__(self, baseline: Predictor, candidates: int, corpus: Corpus) -> None:
        self.corpus = corpus
        self.log: MeasurementLog | None = None
        self.baseline = baseline
        self._batches = corpus.batches()
        self._parts: list[list[list[TokenScores]]] = [[[] for _ in corpus.texts] for _ in range(candidates)]
        self.worst = [WorstPositions() for _ in range(candidates)]
        self.done, self.total = 0, corpus.tokens

    @property
    def empty(self) -> bool:
        """Whether some text has no score yet."""
        return not all(parts for candidate in self._parts for parts in candidate)

    def scores(self, candidate: int, text: int) -> TokenScores:
        """Return the scores so far of one candidate on one text."""
        return concatenate(self._parts[candidate][text])

    @torch.inference_mode()
    def run(self, progress: Progress | None = None) -> None:
        """Score all windows of the corpus that the log does not contain.

        Raises:
            NonFiniteError: If a model's logits are NaN or Inf; the message names the first such token.
        """
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

    @abstractmethod
    def _score(self, batch: WindowBatch) -> list[TokenScores]:
        """Return the scores of each candidate on a batch."""

    def slabs(self, rows: int) -> Iterator[slice]:
        """Yield rows of logits that are held in float64 at a time."""
        slab = max(_SLAB_ELEMENTS // self.baseline.vocab_size, 1)
        return (slice(first, min(first + slab, rows)) for first in range(0, rows, slab))

    def refuse_nan(self, model: Predictor, nll: FloatArray) -> None:
        """Raise the NonFiniteError of a model if its scores hold NaN."""
        if np.isnan(nll).any():
            raise self._first_nan(model)

    def _first_nan(self, model: Predictor) -> NonFiniteError:
        """Return the error that names the first token, in the order of the text, with NaN or Inf logits."""
        for text in self.corpus.texts:
            for window in text.windows:
                ids = torch.tensor([[*self.corpus.prefix, *window.ids.tolist()]])
                features = model.features(ids)[0, :-1]
                rows = model.head_rows()
                starts = range(0, len(features), rows)
                total = torch.cat([model.logits(features[i : i + rows]).logsumexp(-1) for i in starts])
                if not bool(total.isfinite().all()):
                    token = window.start + int((~total.isfinite()).nonzero()[0]) + 1 - len(self.corpus.prefix)
                    document = f" in document {window.document}" if text.documents > 1 else ""
                    return NonFiniteError(
                        f"logits of {model.name}",
                        f"NaN or Inf where token {token}{document} of {text.name} is predicted",
                    )
        return NonFiniteError(f"logits of {model.name}", "NaN or Inf, but not when its windows are run alone")


class ModelsPass(ScoringPass):
    """A pass of loaded models over a corpus."""

    def __init__(self, baseline: Predictor, candidates: Sequence[Predictor], corpus: Corpus) -> None:
        super().__init__(baseline, len(candidates), corpus)
        self._models = (baseline, *candidates)

    def _score(self, batch: WindowBatch) -> list[TokenScores]:
        tokens = BatchTokens(batch)
        features = [model.features(batch.ids)[:, :-1].flatten(0, 1) for model in self._models]
        parts: list[list[TokenScores]] = [[] for _ in self._models[1:]]
        rows = self._models[0].head_rows()
        for start in range(0, len(tokens.targets), rows):
            logits = [m.logits(x[start : start + rows]) for m, x in zip(self._models, features, strict=True)]
            device = logits[0].device
            for slab in self.slabs(len(logits[0])):
                where = slice(start + slab.start, start + slab.stop)
                p, *others = (Distribution(of_model[slab].to(device)) for of_model in logits)
                for candidate, q in enumerate(others):
                    scores = tokens.score(p, q, where)
                    self.refuse_nan(self._models[0], scores.baseline_nll)
                    self.refuse_nan(self._models[candidate + 1], scores.candidate_nll)
                    self.worst[candidate].add(scores, p, q, batch, where.start)
                    parts[candidate].append(scores)
        return [concatenate(of_candidate) for of_candidate in parts]
