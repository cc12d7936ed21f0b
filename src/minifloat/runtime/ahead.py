"""Reads the quantized weights of a checkpoint while others are being packed.

Reading waits for the disk, or copies from the page cache on one core; packing computes. Left out: more than one reading
thread, and any order but the one that was announced.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from minifloat.checkpoint import Checkpoint
from minifloat.layouts import StoredWeight, read_weight
from minifloat.numerics.tensor import QuantizedTensor

#: Weights that are read or being read and not yet asked for.
DEPTH = 2


class ReadAhead:
    """Hands out weights, at best those that were read while the caller was busy.

    Args:
        checkpoint: Open until this is closed.
        order: The weights in the order in which they will be asked for. Another that is asked for is read then and
            there; one that is never asked for ends the reading ahead.
    """

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
        """The weight, as `minifloat.layouts.read_weight` reads it and with its errors."""
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
