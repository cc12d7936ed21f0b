"""Statistics of the inputs of linears, which are added up chunk by chunk so that memory does not grow with the text.

The rows of the experts of a layer are on disk, so that memory holds the products of one expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from minifloat.calibration.layerwise.storage import StoredTensor, TensorFile
from minifloat.kernels.rounding import gram
from minifloat.model.runtime.products import fast_products

#: Rows that are multiplied together: enough for the product to run at full speed.
CHUNK_ROWS = 4096
#: Share of the error of the residual stream that a linear makes up for. All of it would disturb the next norm's input.
RESIDUAL_SHARE = 0.5
#: Rows of held-out text on which the errors of a stage are measured.
HELD_OUT_ROWS = 512


@dataclass(frozen=True)
class Rows:
    """Inputs of a linear, token by token."""

    inputs: Tensor  # X ``[T, K]``, the inputs in the quantized model
    reference: Tensor  # xf ``[T, K]``, the inputs of the same tokens in the original model
    residual: Tensor | None = None

    def pick(self, rows: Tensor | slice) -> Rows:
        return Rows(self.inputs[rows], self.reference[rows], None if self.residual is None else self.residual[rows])

    def float(self) -> Rows:
        residual = None if self.residual is None else self.residual.float()
        return Rows(self.inputs.float(), self.reference.float(), residual)


def join(parts: list[Rows]) -> Rows:
    """Return the rows of all parts, which must not be empty."""
    residuals = [part.residual for part in parts if part.residual is not None]
    return Rows(
        torch.cat([part.inputs for part in parts]),
        torch.cat([part.reference for part in parts]),
        torch.cat(residuals) if residuals else None,
    )


@dataclass
class Statistics:
    """Second moments of the inputs of a linear, over calibration text."""

    hessian: Tensor  # float32 ``[K, K]``, X'X / tokens
    drift: Tensor | None = None  # float32 ``[K, K]``, (Xf - X)'X / tokens
    output_drift: Tensor | None = None
    tokens: int = 0


def output_error(rows: Rows, weight: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return E ``[T, N]``, what the outputs of a linear lack because its inputs are those of the quantized model."""
    error = product(rows.reference - rows.inputs, weight)
    return error if rows.residual is None else error.add_(rows.residual.to(error), alpha=RESIDUAL_SHARE)


class Accumulator:
    """Adds up the products that make `Statistics`, in float32."""

    def __init__(
        self,
        width: int,
        *,
        drift: bool = False,
        adding: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._hessian = torch.zeros(width, width, device=device)
        self._adding = adding if drift else None
        self._drift: Tensor | None = None
        if drift:
            self._drift = torch.zeros(width if adding is None else len(adding), width, device=device)
        self._pending: list[Rows] = []
        self._pending_rows = 0
        self.tokens = 0

    def add(self, rows: Rows, _: Tensor | None = None) -> None:
        """Add some tokens."""
        self._pending.append(rows)
        self._pending_rows += len(rows.inputs)
        self.tokens += len(rows.inputs)
        if self._pending_rows >= CHUNK_ROWS:
            self._multiply()

    def finish(self) -> Statistics:
        """Return the means over all tokens; the accumulator is used up."""
        self._multiply()
        for total in (self._hessian, self._drift):
            if total is not None:
                total.div_(max(self.tokens, 1))
        drift = None if self._drift is None else self._drift.cpu()
        if self._adding is None:
            return Statistics(self._hessian.cpu(), drift, None, self.tokens)
        return Statistics(self._hessian.cpu(), None, drift, self.tokens)

    def _multiply(self) -> None:
        if not self._pending:
            return
        rows = join(self._pending)
        self._pending, self._pending_rows = [], 0
        inputs = rows.inputs.to(self._hessian.device)
        _add_product(inputs, inputs, self._hessian)
        if self._drift is not None:
            moved = Rows(inputs, rows.reference.to(inputs), rows.residual)
            adding = self._adding
            with fast_products():
                lacking = moved.reference - inputs if adding is None else output_error(moved, adding.to(inputs), linear)
            _add_product(lacking, inputs, self._drift)


def _add_product(left: Tensor, right: Tensor, total: Tensor) -> None:
    """Add ``left.T @ right`` to a float32 tensor; on a GPU by torch, in float32."""
    if total.device.type == "cpu":
        gram(left, right, total)
    else:
        total.addmm_(left.T.float(), right.float())


class Sample:
    """Some rows of inputs, kept to measure errors on."""

    def __init__(self, limit: int, parts: int) -> None:
        self._per_part = max(limit // max(parts, 1), 1)
        self._kept: list[Rows] = []

    def add(self, rows: Rows) -> None:
        """Keep some of the rows, spread evenly."""
        count = len(rows.inputs)
        if count:
            kept = rows.pick(torch.arange(0, count, max(-(-count // self._per_part), 1)))
            self._kept.append(kept.float())

    def rows(self) -> Rows | None:
        """Return the kept rows as float32; None if there are none."""
        return join(self._kept) if self._kept else None


class ExpertRows:
    """Keeps the inputs of each expert in a file."""

    def __init__(self, file: TensorFile, count: int) -> None:
        self._file = file
        self._places: list[list[tuple[StoredTensor, StoredTensor]]] = [[] for _ in range(count)]
        self.tokens = [0] * count

    def add(self, rows: Rows, experts: Tensor | None) -> None:
        assert experts is not None
        names, counts = torch.unique_consecutive(experts, return_counts=True)
        first = 0
        for expert, count in zip(names.tolist(), counts.tolist(), strict=True):
            part = rows.pick(slice(first, first + count))
            self._places[expert].append((self._file.append(part.inputs), self._file.append(part.reference)))
            self.tokens[expert] += count
            first += count

    def read(self, expert: int) -> Iterator[Rows]:
        chunk: list[Rows] = []
        for inputs, reference in self._places[expert]:
            chunk.append(Rows(self._file.read(inputs), self._file.read(reference)))
            if sum(len(rows.inputs) for rows in chunk) >= CHUNK_ROWS:
                yield join(chunk)
                chunk = []
        if chunk:
            yield join(chunk)


def divide(
    paired: Iterable[tuple[int, Rows, Tensor | None]],
    sums: Accumulator | ExpertRows,
    samples: Sequence[Sample],
    first_held_out: int,
) -> None:
    for batch, rows, experts in paired:
        if batch < first_held_out:
            sums.add(rows, experts)
        elif experts is None:
            samples[0].add(rows)
        else:
            for expert in torch.unique(experts).tolist():
                samples[expert].add(rows.pick(experts == expert))


def _own_statistics(experts: ExpertRows, width: int, *, drift: bool) -> Iterator[tuple[int, Statistics]]:
    for expert, tokens in enumerate(experts.tokens):
        accumulator = Accumulator(width, drift=drift and tokens >= width)
        for rows in experts.read(expert):
            accumulator.add(rows)
        yield expert, accumulator.finish()


def filled_statistics(
    experts: ExpertRows, width: int, *, drift: bool
) -> Iterator[tuple[int, Statistics, dict[str, Any]]]:
    """Yield each expert with its statistics, filled up with the mean of all experts, and facts for the report."""
    mean = cache(lambda: _mean_hessian(experts, width))
    for expert, statistics in _own_statistics(experts, width, drift=drift):
        own_share = min(statistics.tokens / width, 1.0)
        facts: dict[str, Any] = {"tokens": statistics.tokens}
        if own_share < 1.0:
            mixed = own_share * statistics.hessian + (1.0 - own_share) * mean()
            statistics = Statistics(mixed, None, None, statistics.tokens)
            facts["hessian_share"] = own_share
        yield expert, statistics, facts


def _mean_hessian(experts: ExpertRows, width: int) -> Tensor:
    """Return the mean of X'X over the tokens of all experts, float32 ``[K, K]``; the identity without tokens."""
    total, tokens = torch.zeros(width, width), 0
    for _, own in _own_statistics(experts, width, drift=False):
        total.add_(own.hessian, alpha=own.tokens)
        tokens += own.tokens
    return total.div_(tokens) if tokens else torch.eye(width)
