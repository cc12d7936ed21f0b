"""The tokens at which two models differ most, with what each of them would have said."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from minifloat.compare.corpus import Corpus, WindowBatch
from minifloat.compare.metrics import Distribution, TokenScores
from minifloat.compare.result import LikelyToken, WorstToken

WORST_TOKENS = 20
_CHOICES = 5
_CONTEXT_TOKENS = 48


@dataclass(frozen=True)
class ScoredPosition:
    """A token of the corpus, and what both models expected there.

    Attributes:
        kl: In nats.
        text: Number of the text.
        window: Number of the window in it.
        column: Number of the token in the window.
        baseline: Pairs of a token id and its probability, the most probable first.
        candidate: The same of the candidate.
    """

    kl: float
    text: int
    window: int
    column: int
    baseline: tuple[tuple[int, float], ...]
    candidate: tuple[tuple[int, float], ...]

    @property
    def place(self) -> tuple[int, int, int]:
        """Where it is."""
        return self.text, self.window, self.column


class WorstPositions:
    """The `WORST_TOKENS` spots of the largest KL among all that it is shown."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ScoredPosition]] = []
        self._numbers = itertools.count()

    def offer(self, spots: Iterable[ScoredPosition]) -> None:
        """Keep those that are among the worst; one that is known already counts once."""
        known = {spot.place for _, _, spot in self._heap}
        for spot in spots:
            if spot.place in known:
                continue
            known.add(spot.place)
            heapq.heappush(self._heap, (spot.kl, -next(self._numbers), spot))
            if len(self._heap) > WORST_TOKENS:
                heapq.heappop(self._heap)

    def look(self, scores: TokenScores, p: Distribution, q: Distribution, batch: WindowBatch, first: int) -> None:
        """Go through the scores of a slab of positions.

        Args:
            scores: Of the slab.
            p: The baseline's distributions.
            q: The candidate's.
            batch: That the slab is of.
            first: Number of the slab's first position among the scored positions of the batch.
        """
        bound = self._heap[0][0] if len(self._heap) == WORST_TOKENS else 0.0
        rows = (scores.kl > bound).nonzero()[0]
        width = batch.ids.shape[1] - 1
        for row in sorted(rows, key=lambda row: -scores.kl[row])[:WORST_TOKENS]:
            window, column = divmod(first + int(row), width)
            choices = (_choices(p, int(row)), _choices(q, int(row)))
            self.offer([ScoredPosition(float(scores.kl[row]), batch.text, batch.windows[window], column + 1, *choices)])

    def spots(self) -> list[ScoredPosition]:
        """Worst first."""
        return [spot for _, _, spot in sorted(self._heap, reverse=True)]


def _choices(distribution: Distribution, row: int) -> tuple[tuple[int, float], ...]:
    probabilities = distribution.top_log_probabilities()[row].exp()
    pairs = zip(distribution.top[row].tolist(), probabilities.tolist(), strict=True)
    return tuple(itertools.islice(pairs, _CHOICES))


def describe(spot: ScoredPosition, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> WorstToken:
    """A spot in words."""
    text = corpus.texts[spot.text]
    window = text.windows[spot.window]
    column = spot.column - len(corpus.prefix)
    before = window.ids[max(column - _CONTEXT_TOKENS, 0) : column].tolist()

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def choices(pairs: tuple[tuple[int, float], ...]) -> tuple[LikelyToken, ...]:
        return tuple(LikelyToken(decode([token]), probability) for token, probability in pairs)

    return WorstToken(
        text=text.name,
        document=window.document,
        position=window.start + column,
        context=decode(before),
        token=decode([int(window.ids[column])]),
        kl=spot.kl,
        baseline=choices(spot.baseline),
        candidate=choices(spot.candidate),
    )


def scored_targets(batch: WindowBatch) -> torch.Tensor:
    """The tokens that are predicted in a batch, ``[B * (W - 1)]``."""
    return batch.ids[:, 1:].flatten()
