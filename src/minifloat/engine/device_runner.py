"""Runs a `DeviceDecoder`: a step of one token per sequence by a CUDA graph, pieces of prompts by plain calls.

All numbers of a step go to the device in one asynchronous copy; the logits stay there, for the sampler. A graph repeats
the same work on the same memory, so each of a few batch sizes has its graph, and all graphs read and write the same
buffers. A smaller batch is padded with rows that compute token 0 at position 0 in a spare block that belongs to no
sequence. On a CPU, where the tests run, a graph is a plain call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minifloat.engine.cache import blocks_for
from minifloat.engine.device_decoder import DeviceDecoder, Inputs, Piece, step
from minifloat.engine.scheduler import Runner, WorkItem
from minifloat.engine.sequence import Sequence
from minifloat.engine.transfer import send, staged
from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.kernels.paged import PagedCache

#: Columns before the blocks in a row of a step: token, position, cache row.
COLUMNS = 3


class BlockTables:
    """Holds the blocks of each sequence in a row of its own, from its first step to its release."""

    def __init__(self, rows: int, width: int) -> None:
        self._blocks = np.zeros((rows, width), dtype=np.int32)
        self._lengths = [0] * rows
        self._rows: dict[str, int] = {}
        self._free = list(range(rows))

    def blocks(self, work: WorkItem) -> NDArray[np.int32]:
        """Return the blocks of a sequence up to the end of its work; the next call may overwrite them."""
        return self._blocks[self._row(work.sequence), : blocks_for(work.end)]

    def fill(self, rows: NDArray[np.int32], works: Sequences[WorkItem]) -> None:
        """Write work of one token each into rows: token, position, cache row and blocks."""
        count = len(works)
        starts = [work.start for work in works]
        positions = np.array(starts, dtype=np.int64)
        blocks = rows[:count, COLUMNS:]
        own = np.array([self._row(work.sequence) for work in works], dtype=np.int64)
        blocks[:] = self._blocks[own, : blocks.shape[1]]
        # A token that is not known yet is left out: `DecodeGraphs.run` gets it.
        tokens = [sequence.tokens[start] for sequence, start, *_ in works if start < len(sequence.tokens)]
        rows[: len(tokens), 0] = tokens
        rows[:count, 1] = positions
        rows[:count, 2] = blocks[np.arange(count), positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS

    def release(self, sequence: Sequence) -> None:
        row = self._rows.pop(sequence.request_id, None)
        if row is not None:
            self._lengths[row] = 0
            self._free.append(row)

    def _row(self, sequence: Sequence) -> int:
        """Return the row of a sequence, after adding the blocks that it was given since the last call."""
        row = self._rows.get(sequence.request_id)
        if row is None:
            row = self._rows[sequence.request_id] = self._free.pop()
        length = len(sequence.blocks)
        before = self._lengths[row]
        if length > before:
            self._blocks[row, before:length] = sequence.blocks[before:]
            self._lengths[row] = length
        return row


_EVERY = 8


def bucket_sizes(most: int) -> list[int]:
    """Return the batch sizes that have a graph: 1, 2, 4, then the multiples of 8, and `most`."""
    return sorted({*(size for size in (1, 2, 4) if size < most), *range(_EVERY, most, _EVERY), most})


class Graph(Protocol):
    def replay(self) -> None:
        """Run the function again, on the same memory."""


class CudaGraph:
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
        self._graph.replay()


class PlainCall:
    """Replaces a graph on a CPU: a plain call of the function, which uses the same memory."""

    def __init__(self, work: Callable[[], None], pool: Any) -> None:
        work()
        self.replay = work


class DecodeGraphs:
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
        count, columns = rows.shape
        self.inputs[:count, :columns].copy_(staged(rows, self._device), non_blocking=True)
        if tokens is not None:
            self.inputs[: len(tokens), 0].copy_(tokens)
        self._graphs[count].replay()
        return self.logits[:count]

    def _work(self, size: int) -> None:
        rows = self.inputs[:size]
        self.logits[:size].copy_(step(self._decoder, self._cache, Inputs(rows[:, :COLUMNS], rows[:, COLUMNS:])))


class DeviceRunner(Runner):
    name, on_device = "device", True

    @torch.no_grad()
    def __init__(
        self,
        decoder: DeviceDecoder,
        blocks: int,
        element: str,
        scales: Tensor | None,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._decoder, self._device = decoder, decoder.device
        self._tables = BlockTables(max_num_seqs, blocks_for(max_model_len))
        self.weight_bytes, self.prefill_bytes = decoder.bytes_per_token, decoder.prefill_bytes
        self.vocab = decoder.vocab
        sizes = (len(decoder.layers), decoder.kv_heads, decoder.head_dim)
        self._cache = PagedCache(*sizes, blocks, element, self._device, max_num_seqs, scales)
        self._graphs = DecodeGraphs(decoder, self._cache, max_num_seqs, blocks_for(max_model_len))
        self.kv_element, self.kv_bytes = element, self._cache.nbytes

    @torch.no_grad()
    def run(self, works: Sequences[WorkItem], memory: Tensor | None = None) -> Tensor:
        if all(end - start == 1 and end == len(sequence.tokens) for sequence, start, end, *_ in works):
            return self._run_graph(works)
        return step(self._decoder, self._cache, self._mixed(works)).float()

    @torch.no_grad()
    def run_ahead(self, works: Sequences[WorkItem], tokens: Tensor) -> Tensor:
        return self._run_graph(works, tokens)

    def _run_graph(self, works: Sequences[WorkItem], tokens: Tensor | None = None) -> Tensor:
        rows = self._graphs.rows(self._graphs.size(len(works)), self._width(works))
        self._tables.fill(rows, works)
        return self._graphs.run(rows, tokens)[: len(works)]

    def release(self, sequence: Sequence) -> None:
        self._tables.release(sequence)

    def _width(self, works: Sequences[WorkItem]) -> int:
        return blocks_for(max([work.end for work in works], default=0))

    def _mixed(self, works: Sequences[WorkItem]) -> Inputs:
        """Return the inputs of any work, single tokens first, then pieces; one array is sent and cut on the device."""
        singles = [work for work in works if work.end - work.start == 1]
        pieces = [work for work in works if work.end - work.start > 1]
        table = np.zeros((len(singles), COLUMNS + self._width(singles)), dtype=np.int32)
        self._tables.fill(table, singles)
        rows, blocks = [table[:, :COLUMNS]], [self._tables.blocks(work) for work in pieces]
        ends: dict[str, int] = {work.sequence.request_id: row for row, work in enumerate(singles)}
        count = len(singles)
        for work, own in zip(pieces, blocks, strict=True):
            positions = np.arange(work.start, work.end, dtype=np.int32)
            cache_rows = own[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
            rows.append(np.stack([work.sequence.tokens[work.start : work.end], positions, cache_rows], axis=1))
            count += len(positions)
            ends[work.sequence.request_id] = count - 1
        after = [(ends[work.sequence.request_id] + 1, work.logits) for work in works]
        logits = np.array([row for end, wanted in after for row in range(end - wanted, end)], dtype=np.int32)
        parts = [np.concatenate(rows), table[:, COLUMNS:], logits, *blocks]
        flat = send(np.concatenate([part.ravel() for part in parts], dtype=np.int32, casting="unsafe"), self._device)
        sent = torch.split_with_sizes(flat, [part.size for part in parts])
        first = [ends[work.sequence.request_id] - (work.end - work.start) + 1 for work in pieces]
        return Inputs(
            sent[0].view(-1, COLUMNS),
            sent[1].view(table.shape[0], -1) if singles else sent[1].view(0, 1),
            tuple(
                Piece(slice(row, row + work.end - work.start), work.start, own)
                for row, work, own in zip(first, pieces, sent[3:], strict=True)
            ),
            sent[2],
        )
