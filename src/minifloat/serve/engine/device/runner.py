"""Runs a `DeviceDecoder`: a step that is one token of every sequence by a graph, one with pieces of prompts as calls.

All numbers of a step go to the device in one copy that nobody waits for; logits stay there, for the sampler.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Sequences

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.kernels.paged import PagedCache
from minifloat.serve.engine.cache import blocks_for
from minifloat.serve.engine.device.decoder import DeviceDecoder, Inputs, Piece, step
from minifloat.serve.engine.device.graphs import COLUMNS, DecodeGraphs
from minifloat.serve.engine.device.transfer import send
from minifloat.serve.engine.scheduler import Work
from minifloat.serve.engine.sequence import Sequence


class DeviceRunner:
    """See `minifloat.serve.engine.runner.Runner`.

    Args:
        decoder: The model.
        blocks: Blocks of the KV cache.
        element: Their format, one of `minifloat.kernels.paged.ELEMENTS`.
        scales: Of an E4M3 cache: float32 ``[layers, 2, kv_heads]``; or None.
        max_num_seqs: Sequences that run at a time.
        max_model_len: Tokens of the longest.
    """

    name = "device"

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
        self._tables: dict[str, array[int]] = {}
        self.weight_bytes = decoder.bytes_per_token
        self.vocab = decoder.vocab
        sizes = (len(decoder.layers), decoder.kv_heads, decoder.head_dim)
        self._cache = PagedCache(*sizes, blocks, element, self._device, max_num_seqs, scales)
        self._graphs = DecodeGraphs(decoder, self._cache, max_num_seqs, blocks_for(max_model_len))
        self.kv_element, self.kv_bytes = element, self._cache.nbytes

    @torch.no_grad()
    def run(self, works: Sequences[Work]) -> Tensor:
        """As the interface says; on the device, and the next call may overwrite it."""
        if all(work.samples and work.end - work.start == 1 for work in works):
            rows = self._graphs.rows(self._graphs.size(len(works)), self._width(works))
            self._fill(rows, works)
            return self._graphs.run(rows)[: len(works)]
        return step(self._decoder, self._cache, self._mixed(works)).float()

    def release(self, sequence: Sequence) -> None:
        """Its blocks are others' now."""
        self._tables.pop(sequence.request_id, None)

    def _width(self, works: Sequences[Work]) -> int:
        return max((blocks_for(work.end) for work in works), default=0)

    def _blocks(self, work: Work) -> NDArray[np.int32]:
        """The blocks of a sequence up to the end of its work; kept, for a list of thousands takes long to convert."""
        sequence = work.sequence
        held = self._tables.setdefault(sequence.request_id, array("i"))
        held.extend(sequence.blocks[len(held) :])
        return np.array(held, dtype=np.int32)[: blocks_for(work.end)]

    def _fill(self, rows: NDArray[np.int32], works: Sequences[Work]) -> None:
        """Token, position, slot and blocks of works of one token."""
        for row, work in zip(rows, works, strict=False):
            blocks, position = self._blocks(work), work.start
            slot = blocks[-1] * BLOCK_TOKENS + position % BLOCK_TOKENS
            row[:COLUMNS] = work.sequence.tokens[position], position, slot
            row[COLUMNS : COLUMNS + len(blocks)] = blocks

    def _mixed(self, works: Sequences[Work]) -> Inputs:
        """Any works: those of one token first, then the pieces; everything in one array, cut up on the device."""
        singles = [work for work in works if work.end - work.start == 1]
        pieces = [work for work in works if work.end - work.start > 1]
        table = np.zeros((len(singles), COLUMNS + self._width(singles)), dtype=np.int32)
        self._fill(table, singles)
        rows, blocks = [table[:, :COLUMNS]], [self._blocks(work) for work in pieces]
        ends: dict[str, int] = {work.sequence.request_id: row for row, work in enumerate(singles)}
        count = len(singles)
        for work, own in zip(pieces, blocks, strict=True):
            positions = np.arange(work.start, work.end, dtype=np.int32)
            slots = own[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
            rows.append(np.stack([work.sequence.tokens[work.start : work.end], positions, slots], axis=1))
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
