"""Runs a `DeviceDecoder`: a step of one token per sequence by a graph, a step with pieces of prompts by plain calls.

All numbers of a step go to the device in one asynchronous copy; the logits stay there, for the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import numpy as np
import torch
from torch import Tensor

from minifloat.engine.cache import blocks_for
from minifloat.engine.device.decoder import DeviceDecoder, Inputs, Piece, step
from minifloat.engine.device.graphs import DecodeGraphs
from minifloat.engine.device.tables import COLUMNS, BlockTables
from minifloat.engine.device.transfer import send
from minifloat.engine.runner import Runner
from minifloat.engine.scheduler import WorkItem
from minifloat.engine.sequence import Sequence
from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.kernels.paged import PagedCache


class DeviceRunner(Runner):
    """Runs the decoder of a device."""

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
    def run(self, works: Sequences[WorkItem]) -> Tensor:
        """Compute tokens, as `Runner.run`; the logits are on the device, and the next call may overwrite them."""
        if all(end - start == 1 and end == len(sequence.tokens) for sequence, start, end, *_ in works):
            return self._run_graph(works)
        return step(self._decoder, self._cache, self._mixed(works)).float()

    @torch.no_grad()
    def run_ahead(self, works: Sequences[WorkItem], tokens: Tensor) -> Tensor:
        """Compute one token of each sequence, as `run`, before the host knows the tokens."""
        return self._run_graph(works, tokens)

    def _run_graph(self, works: Sequences[WorkItem], tokens: Tensor | None = None) -> Tensor:
        rows = self._graphs.rows(self._graphs.size(len(works)), self._width(works))
        self._tables.fill(rows, works)
        return self._graphs.run(rows, tokens)[: len(works)]

    def release(self, sequence: Sequence) -> None:
        """Forget the block table of a sequence, whose blocks may be given to another."""
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
