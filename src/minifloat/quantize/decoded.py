"""Writes quantized weights of a source dequantized, a few rows at a time; `quantize` and `convert` share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint, OutputTensor
from minifloat.checkpoint.shard import ShardWriter
from minifloat.errors import NonFiniteError
from minifloat.model.layouts import StoredWeight
from minifloat.model.layouts.reading import read_rows
from minifloat.model.layouts.values import narrow

#: Bytes of float32 that are decoded at a time.
_SLAB_BYTES = 2 << 20


def write_decoded(
    checkpoint: Checkpoint,
    matrices: Sequence[Sequence[StoredWeight]],
    output: OutputTensor,
    shard: ShardWriter,
    *,
    transposed: bool,
) -> None:
    """Write a decoded matrix, or the fused matrices of all experts.

    Values are decoded in float32 and rounded once, to nearest even.
    """
    end = 0
    for weights in matrices:
        if transposed:  # as a whole; one expert is small
            matrix = [_narrowed(checkpoint, weight, 0, weight.shape[0], output.dtype) for weight in weights]
            data = np.ascontiguousarray(np.concatenate(matrix).T)
            shard.write(output.name, data.reshape(-1).view(np.uint8), end)
            end += data.nbytes
            continue
        for weight in weights:
            rows, cols = weight.shape
            slab = max(_SLAB_BYTES // (cols * np.dtype(np.float32).itemsize), 1)
            for first in range(0, rows, slab):
                data = _narrowed(checkpoint, weight, first, min(first + slab, rows), output.dtype)
                shard.write(output.name, data.reshape(-1).view(np.uint8), end)
                end += data.nbytes


def _narrowed(checkpoint: Checkpoint, weight: StoredWeight, first: int, stop: int, dtype: str) -> npt.NDArray[Any]:
    """Return decoded rows ``[stop - first, K]`` as integers that hold the bits of a dtype."""
    data, nonfinite = narrow(read_rows(checkpoint, weight, first, stop), dtype)
    if nonfinite:
        raise NonFiniteError(weight.codes, f"NaN, or values beyond the range of {dtype}")
    item = data.nbytes // ((stop - first) * weight.shape[1])
    return data.reshape(-1).view(f"u{item}").reshape(stop - first, weight.shape[1])
