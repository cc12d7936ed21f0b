"""Statistics of the experts of a layer, each from the tokens that were routed to it.

The rows of all experts are on disk, so that memory holds the products of one expert at a time. An expert that saw
fewer tokens than it has input channels gets no full Hessian from them: the mean over all experts fills it up, and the
drift, which so few tokens do not determine, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minifloat.calibration.layerwise.storage import StoredTensor, TensorFile
from minifloat.quantize.rounding.statistics import CHUNK_ROWS, Accumulator, Rows, Statistics, join


class SlotRows:
    """Keeps the inputs of each expert in a file."""

    def __init__(self, file: TensorFile, count: int) -> None:
        self._file = file
        self._places: list[list[tuple[StoredTensor, StoredTensor]]] = [[] for _ in range(count)]
        self.tokens = [0] * count

    def keep(self, rows: Rows, experts: Tensor) -> None:
        """Keep some rows."""
        names, counts = torch.unique_consecutive(experts, return_counts=True)
        first = 0
        for expert, count in zip(names.tolist(), counts.tolist(), strict=True):
            part = rows.pick(slice(first, first + count))
            self._places[expert].append((self._file.append(part.inputs), self._file.append(part.reference)))
            self.tokens[expert] += count
            first += count

    def read(self, expert: int) -> Iterator[Rows]:
        """Yield the rows of an expert in chunks."""
        chunk: list[Rows] = []
        for inputs, reference in self._places[expert]:
            chunk.append(Rows(self._file.read(inputs), self._file.read(reference)))
            if sum(len(rows.inputs) for rows in chunk) >= CHUNK_ROWS:
                yield join(chunk)
                chunk = []
        if chunk:
            yield join(chunk)


def own_statistics(slots: SlotRows, width: int, *, drift: bool) -> Iterator[tuple[int, Statistics]]:
    """Yield each expert with the statistics of the inputs that were routed to it."""
    for slot, tokens in enumerate(slots.tokens):
        accumulator = Accumulator(width, drift=drift and tokens >= width)
        for rows in slots.read(slot):
            accumulator.add(rows)
        yield slot, accumulator.finish()


def slot_statistics(slots: SlotRows, width: int, *, drift: bool) -> Iterator[tuple[int, Statistics, dict[str, Any]]]:
    """Yield each expert with the statistics of its inputs, and facts for the report."""
    mean = cache(lambda: mean_hessian((own for _, own in own_statistics(slots, width, drift=False)), width))
    for slot, statistics in own_statistics(slots, width, drift=drift):
        yield slot, *filled_up(statistics, width, mean)


def filled_up(statistics: Statistics, width: int, mean: Callable[[], Tensor]) -> tuple[Statistics, dict[str, Any]]:
    """Return the statistics of an expert, filled up with the mean of all experts, and facts for the report."""
    own_share = min(statistics.tokens / width, 1.0)
    facts: dict[str, Any] = {"tokens": statistics.tokens}
    if own_share < 1.0:
        mixed = own_share * statistics.hessian + (1.0 - own_share) * mean()
        statistics = Statistics(mixed, None, None, statistics.tokens)
        facts["hessian_share"] = own_share
    return statistics, facts


def mean_hessian(experts: Iterable[Statistics], width: int) -> Tensor:
    """Return the mean of X'X over the tokens of all experts, float32 ``[K, K]``; the identity without tokens."""
    total, tokens = torch.zeros(width, width), 0
    for own in experts:
        total.add_(own.hessian, alpha=own.tokens)
        tokens += own.tokens
    return total.div_(tokens) if tokens else torch.eye(width)
