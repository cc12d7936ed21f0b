"""The block tables of the running sequences, as rows of one array, so that a step copies rows and converts no list."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import numpy as np
from numpy.typing import NDArray

from minifloat.engine.cache import blocks_for
from minifloat.engine.scheduler import WorkItem
from minifloat.engine.sequence import Sequence
from minifloat.kernels.decoder import BLOCK_TOKENS

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
        """Write work of one token each into rows: token, position, cache row and blocks.

        A token that is not known yet is left out.
        """
        count = len(works)
        starts = [work.start for work in works]
        positions = np.array(starts, dtype=np.int64)
        blocks = rows[:count, COLUMNS:]
        own = np.array([self._row(work.sequence) for work in works], dtype=np.int64)
        blocks[:] = self._blocks[own, : blocks.shape[1]]
        tokens = [sequence.tokens[start] for sequence, start, *_ in works if start < len(sequence.tokens)]
        rows[: len(tokens), 0] = tokens
        rows[:count, 1] = positions
        rows[:count, 2] = blocks[np.arange(count), positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence, whose blocks may be given to another."""
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
