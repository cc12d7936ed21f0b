"""Counters that tell a CTA whether it is the last of its tile of the result. Imports no triton.

They must be zero before a launch, and the last CTA sets them to zero again. New counters would have to be zeroed in
every call, in a captured graph too; so each stream has a row of counters, all zeroed when the first weight is packed
for a device. As with the workspaces of cuBLAS, a graph uses the row of the stream that it was captured on, and must not
be replayed concurrently with other products of this stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.kernels.linear.triton.config import MAX_TILES

_STREAMS = 128
#: For each device: the rows of counters, and the index of the row by stream.
_ROWS: dict[torch.device, tuple[Tensor, dict[int, int]]] = {}


def prepare(device: torch.device) -> None:
    """Allocate the counters of a device, which is not possible while a graph is captured."""
    if device not in _ROWS:
        _ROWS[device] = torch.zeros((_STREAMS, MAX_TILES), dtype=torch.int32, device=device), {}
        torch.cuda.synchronize(device)


def take(device: torch.device, tiles: int) -> Tensor:
    """Return at least `tiles` zeros, int32, for a launch on the current stream."""
    if device.type != "cuda":  # Triton's interpreter
        return torch.zeros(tiles, dtype=torch.int32, device=device)
    prepare(device)
    counters, rows = _ROWS[device]
    row = rows.setdefault(torch.cuda.current_stream(device).cuda_stream, len(rows))
    if row < _STREAMS and tiles <= MAX_TILES:
        return counters[row]
    return torch.zeros(tiles, dtype=torch.int32, device=device)
