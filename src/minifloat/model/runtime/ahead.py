"""Reads the quantized weights of a checkpoint while others are being packed.

Reading waits for the disk, or copies from the page cache on one core; packing computes. Left out: more than one reading
thread, and reading ahead in any order but the announced one.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from minifloat.checkpoint import Checkpoint
from minifloat.model.layouts import StoredWeight, read_weight
from minifloat.numerics.tensor import QuantizedTensor

#: Number of weights that are read ahead.
DEPTH = 2


class ReadAhead:
    """Reads weights on a second thread, in an announced order."""

    def __init__(self, checkpoint: Checkpoint, order: Iterable[StoredWeight]) -> None:
        self._checkpoint = checkpoint
        self._rest = iter(order)
        self._reads: dict[str, Future[QuantizedTensor]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="minifloat-read")
        for _ in range(DEPTH):
            self._read_next()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._reads.clear()

    def read(self, stored: StoredWeight) -> QuantizedTensor:
        """Return a weight, as `minifloat.model.layouts.read_weight` does and with its errors."""
        read = self._reads.pop(stored.module, None)
        if read is None:
            return read_weight(self._checkpoint, stored)
        weight = read.result()
        self._read_next()
        return weight

    def _read_next(self) -> None:
        stored = next(self._rest, None)
        if stored is not None:
            self._reads[stored.module] = self._pool.submit(read_weight, self._checkpoint, stored)
