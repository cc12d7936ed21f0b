"""The counters by which the last CTA of a tile of the result knows that it is the last. Imports no triton.

They must be zero before a launch, and the last CTA makes them so again. Made in every call they would have to be zeroed
in every call, in a captured graph too; so there is a row of them for each stream, all zeroed when the first weight is
packed for a device. As with the workspaces of cuBLAS, a graph uses the row of the stream that it was captured on, and
must not be replayed beside other products on that stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.kernels.linear.triton.config import MAX_TILES

_STREAMS = 128
#: Of each device: a row for each stream, and which row a stream has.
_ROWS: dict[torch.device, tuple[Tensor, dict[int, int]]] = {}


def prepare(device: torch.device) -> None:
    """Make the counters of a device, which cannot be done while a graph is captured."""
    if device not in _ROWS:
        _ROWS[device] = torch.zeros((_STREAMS, MAX_TILES), dtype=torch.int32, device=device), {}
        torch.cuda.synchronize(device)


def take(device: torch.device, tiles: int) -> Tensor:
    """Zeros for a launch on the current stream, int32, at least `tiles` of them."""
    if device.type != "cuda":  # Triton's interpreter
        return torch.zeros(tiles, dtype=torch.int32, device=device)
    prepare(device)
    counters, rows = _ROWS[device]
    row = rows.setdefault(torch.cuda.current_stream(device).cuda_stream, len(rows))
    if row < _STREAMS and tiles <= MAX_TILES:
        return counters[row]
    return torch.zeros(tiles, dtype=torch.int32, device=device)
