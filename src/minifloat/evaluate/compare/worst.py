"""The tokens at which two models differ most, with the tokens that each model expected there."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from minifloat.evaluate.compare.corpus import Corpus, WindowBatch
from minifloat.evaluate.compare.metrics import Distribution, TokenScores
from minifloat.evaluate.compare.result import LikelyToken, WorstToken

WORST_TOKENS = 20
_LIKELY_TOKENS = 5
_CONTEXT_TOKENS = 48


@dataclass(frozen=True)
class ScoredPosition:
    """A token of the corpus, and the tokens that both models expected there.

    Attributes:
        kl: KL divergence in nats.
    """

    kl: float
    text: int
    window: int
    column: int
    baseline: tuple[tuple[int, float], ...]
    candidate: tuple[tuple[int, float], ...]

    @property
    def place(self) -> tuple[int, int, int]:
        """Text, window and column."""
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

    def add(self, scores: TokenScores, p: Distribution, q: Distribution, batch: WindowBatch, first: int) -> None:
        """Add the worst positions of a slab."""
        bound = self._heap[0][0] if len(self._heap) == WORST_TOKENS else 0.0
        rows = (scores.kl > bound).nonzero()[0]
        width = batch.ids.shape[1] - 1
        for row in sorted(rows, key=lambda row: -scores.kl[row])[:WORST_TOKENS]:
            window, column = divmod(first + int(row), width)
            tokens = (_likely_tokens(p, int(row)), _likely_tokens(q, int(row)))
            self.offer([ScoredPosition(float(scores.kl[row]), batch.text, batch.windows[window], column + 1, *tokens)])

    def ranked(self) -> list[ScoredPosition]:
        """Return the positions, the largest KL divergence first."""
        return [position for _, _, position in sorted(self._heap, reverse=True)]


def _likely_tokens(distribution: Distribution, row: int) -> tuple[tuple[int, float], ...]:
    probabilities = distribution.top_log_probabilities()[row].exp()
    pairs = zip(distribution.top[row].tolist(), probabilities.tolist(), strict=True)
    return tuple(itertools.islice(pairs, _LIKELY_TOKENS))


def to_worst_token(position: ScoredPosition, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> WorstToken:
    """Decode a position: its context, its token, and the tokens that both models expected."""
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
