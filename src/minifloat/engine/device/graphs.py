"""Decode steps as CUDA graphs: one launch in the place of about three hundred.

A graph repeats the same work on the same memory, so each of a few batch sizes has its graph, and all graphs read and
write the same buffers. A smaller batch is padded with rows that compute token 0 at position 0 in a spare block that
belongs to no sequence. The graphs share one pool of memory; the largest is captured first, and the others reuse its
memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minifloat.engine.device.decoder import DeviceDecoder, Inputs, step
from minifloat.engine.device.tables import COLUMNS
from minifloat.engine.device.transfer import staged
from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.kernels.paged import PagedCache

_EVERY = 8


def bucket_sizes(most: int) -> list[int]:
    """Return the batch sizes that have a graph: 1, 2, 4, then the multiples of 8, and `most`."""
    return sorted({*(size for size in (1, 2, 4) if size < most), *range(_EVERY, most, _EVERY), most})


class Graph(Protocol):
    """A function that was recorded once."""

    def replay(self) -> None:
        """Run the function again, on the same memory."""


class CudaGraph:
    """A CUDA graph."""

    def __init__(self, work: Callable[[], None], pool: Any) -> None:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
            work()
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            work()

    def replay(self) -> None:
        """Run the recorded function again."""
        self._graph.replay()


class PlainCall:
    """Replaces a graph on a CPU: a plain call of the function, which uses the same memory."""

    def __init__(self, work: Callable[[], None], pool: Any) -> None:
        work()
        self.replay = work


class DecodeGraphs:
    """The graphs of a decoder, and their buffers.

    Attributes:
        inputs: int32 ``[rows, COLUMNS + width]``: token, position, cache row and blocks of each sequence.
        logits: float32 ``[rows, vocab]``.
    """

    def __init__(self, decoder: DeviceDecoder, cache: PagedCache, rows: int, width: int) -> None:
        self._decoder, self._cache, self._device = decoder, cache, decoder.device
        self.inputs = torch.zeros(rows, COLUMNS + width, dtype=torch.int32, device=self._device)
        self.inputs[:, : COLUMNS + 1] = torch.from_numpy(self.rows(1, 1)).to(self._device)
        self.logits = torch.zeros(rows, decoder.vocab, device=self._device)
        on_gpu = self._device.type == "cuda"
        pool = torch.cuda.graph_pool_handle() if on_gpu else None
        make: Callable[[Callable[[], None], Any], Graph] = CudaGraph if on_gpu else PlainCall
        self._graphs = {size: make(functools.partial(self._work, size), pool) for size in reversed(bucket_sizes(rows))}

    def rows(self, count: int, width: int) -> NDArray[np.int32]:
        """Return padding rows, with room for `width` blocks; they write into the spare block only."""
        rows = np.zeros((count, COLUMNS + width), dtype=np.int32)
        rows[:, COLUMNS - 1], rows[:, COLUMNS] = self._cache.spare * BLOCK_TOKENS, self._cache.spare
        return rows

    def size(self, count: int) -> int:
        """Return the smallest batch size with a graph that holds `count` sequences."""
        return min(size for size in self._graphs if size >= count)

    def run(self, rows: NDArray[np.int32], tokens: Tensor | None = None) -> Tensor:
        """Compute one token of each sequence."""
        count, columns = rows.shape
        self.inputs[:count, :columns].copy_(staged(rows, self._device), non_blocking=True)
        if tokens is not None:
            self.inputs[: len(tokens), 0].copy_(tokens)
        self._graphs[count].replay()
        return self.logits[:count]

    def _work(self, size: int) -> None:
        rows = self.inputs[:size]
        self.logits[:size].copy_(step(self._decoder, self._cache, Inputs(rows[:, :COLUMNS], rows[:, COLUMNS:])))
