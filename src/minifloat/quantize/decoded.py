"""Writes quantized weights of a source dequantized, a few rows at a time; `quantize` and `convert` share it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minifloat.checkpoint import Checkpoint, OutputTensor
from minifloat.checkpoint.shard import ShardWriter
from minifloat.errors import NonFiniteError
from minifloat.layouts import StoredWeight
from minifloat.layouts.reading import read_rows
from minifloat.layouts.values import narrow

#: Bytes of float32 that are decoded at a time.
_SLAB_BYTES = 2 << 20


def write_decoded(
    checkpoint: Checkpoint, weights: Sequence[StoredWeight], output: OutputTensor, shard: ShardWriter
) -> None:
    """Write one decoded weight, or the fused weights of all experts, each transposed.

    Values are decoded in float32 and rounded once, to nearest even.

    Args:
        checkpoint: The quantized checkpoint.
        weights: The weights that the output holds.
        output: A tensor of BF16, F16 or F32, as `layouts.decoded.plain_tensor` returns it.
        shard: Where it is written.

    Raises:
        NonFiniteError: A code is NaN, a scale is NaN or Inf, or a value exceeds the range of the output.
        StorageError: The operating system refused to read or write.
    """
    start = 0
    for weight in weights:
        rows, cols = weight.shape
        transposed = weight.expert is not None  # as a whole; one expert is small
        slab = rows if transposed else max(_SLAB_BYTES // (cols * np.dtype(np.float32).itemsize), 1)
        for first in range(0, rows, slab):
            values = read_rows(checkpoint, weight, first, min(first + slab, rows))
            data, nonfinite = narrow(np.ascontiguousarray(values.T) if transposed else values, output.dtype)
            if nonfinite:
                raise NonFiniteError(weight.codes, f"NaN, or values beyond the range of {output.dtype}")
            shard.write(output.name, data, start)
            start += data.nbytes
