"""All models over all windows, in lockstep: a batch goes through each of them before the next one comes.

So several candidates cost one pass of the baseline, nothing has to be kept but a few numbers per token, and a run that
is interrupted has seen the same tokens with every model. Those numbers can be written down while it runs
(`minifloat.compare.measurements`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minifloat.compare.corpus import Corpus, WindowBatch
from minifloat.compare.measurements import MeasurementLog
from minifloat.compare.metrics import Distribution, TokenScores, concatenate, score_tokens
from minifloat.compare.models import Predictor
from minifloat.compare.worst import WorstPositions, scored_targets
from minifloat.errors import NonFiniteError
from minifloat.report.progress import Progress

#: Logits of one model that are held in float64 at a time: so few that they stay in the processor's caches.
_SLAB_ELEMENTS = 2**18


class ScoringPass:
    """A pass over a corpus, and what came of it so far.

    Args:
        baseline: The model that the others are held against.
        candidates: At least one.
        corpus: The windows.
        journal: What an earlier run has done, and where to write down what is done.

    Attributes:
        done: Tokens of text that all models have seen.
        total: Tokens of text in all windows.
    """

    def __init__(
        self,
        baseline: Predictor,
        candidates: Sequence[Predictor],
        corpus: Corpus,
        journal: MeasurementLog | None = None,
    ) -> None:
        self.corpus = corpus
        self._models = (baseline, *candidates)
        self.journal = journal
        self._batches = corpus.batches()
        self._parts: list[list[list[TokenScores]]] = [[[] for _ in corpus.texts] for _ in candidates]
        self.worst = [WorstPositions() for _ in candidates]
        self.done, self.total = 0, corpus.tokens

    @property
    def empty(self) -> bool:
        """Whether some text has no score yet."""
        return not all(parts for candidate in self._parts for parts in candidate)

    def scores(self, candidate: int, text: int) -> TokenScores:
        """What is known of a text."""
        return concatenate(self._parts[candidate][text])

    @torch.inference_mode()
    def run(self, progress: Progress | None = None) -> None:
        """Go through the corpus, or through what is left of it.

        Raises:
            NonFiniteError: A model's logits are NaN or Inf; says where first.
        """
        for number, batch in enumerate(self._batches):
            known = self.journal.scores(number) if self.journal is not None else None
            scores = self._score(batch) if known is None else known
            for parts, one in zip(self._parts, scores, strict=True):
                parts[batch.text].append(one)
            self.done += batch.tokens
            if self.journal is not None and known is None:
                self.journal.add(number, scores)
            if progress is not None:
                progress(self.done, self.total, self.corpus.texts[batch.text].name)
        if self.journal is not None:
            self.journal.flush()

    def _score(self, batch: WindowBatch) -> list[TokenScores]:
        """The scores of each candidate."""
        targets = scored_targets(batch)
        units = batch.units[:, None].expand(-1, batch.ids.shape[1] - 1).flatten()
        features = [model.features(batch.ids)[:, :-1].flatten(0, 1) for model in self._models]
        parts: list[list[TokenScores]] = [[] for _ in self._models[1:]]
        rows = self._models[0].head_rows()
        slab = max(_SLAB_ELEMENTS // self._models[0].vocab_size, 1)
        for start in range(0, len(targets), rows):
            logits = [m.logits(x[start : start + rows]) for m, x in zip(self._models, features, strict=True)]
            for first in range(0, len(logits[0]), slab):
                where = slice(start + first, start + min(first + slab, len(logits[0])))
                p, *others = (Distribution(some[first : first + slab].to(logits[0].device)) for some in logits)
                for candidate, q in enumerate(others):
                    scores = score_tokens(p, q, targets[where], units[where])
                    self._check(scores, candidate)
                    self.worst[candidate].look(scores, p, q, batch, where.start)
                    parts[candidate].append(scores)
        return [concatenate(some) for some in parts]

    def _check(self, scores: TokenScores, candidate: int) -> None:
        for model, nll in ((self._models[0], scores.baseline_nll), (self._models[candidate + 1], scores.candidate_nll)):
            if np.isnan(nll).any():
                raise self._first_nan(model)

    def _first_nan(self, model: Predictor) -> NonFiniteError:
        """Where a model's logits are NaN or Inf for the first time, in the order of the text."""
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
