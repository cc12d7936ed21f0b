"""The bytes of a conversion: read, changed and written a chunk, or some rows of one weight, at a time."""

from __future__ import annotations

import numpy as np

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.checkpoint.digest import name_digest, new_hasher
from minifloat.checkpoint.shard import ShardWriter
from minifloat.convert.plan import Change, Conversion
from minifloat.convert.values import reciprocal
from minifloat.errors import NonFiniteError
from minifloat.layouts import StoredWeight
from minifloat.layouts.reading import read_rows
from minifloat.layouts.values import narrow, widen
from minifloat.quantize.stream import SLAB_BYTES, chunks, copy_digest, copy_tensor


def run_conversion(checkpoint: Checkpoint, conversion: Conversion, shard: ShardWriter | None) -> list[str]:
    """Write the output of a conversion.

    Args:
        checkpoint: The source.
        conversion: Source tensors and their output.
        shard: Where the output is written; None where no conversion of its shard has an output.

    Returns:
        The digest of each source tensor.

    Raises:
        NonFiniteError: NaN or Inf in a tensor that is copied or decoded, or in a scale.
    """
    info = conversion.sources[0]
    if shard is None or conversion.output is None:
        return [copy_digest(checkpoint, source) for source in conversion.sources]
    if conversion.change is Change.KEEP:
        return [copy_tensor(checkpoint, info, shard)]
    if conversion.change is Change.DECODE:
        digests = [copy_digest(checkpoint, source) for source in conversion.sources]
        _decode(checkpoint, conversion, shard)
        return digests
    if conversion.change is Change.INVERT:
        shard.write(conversion.output.name, reciprocal(checkpoint, info).value.reshape(1))
        return [copy_digest(checkpoint, info)]
    return [_move(checkpoint, info, conversion.output.name, shard, widened=conversion.change is Change.WIDEN)]


def _move(checkpoint: Checkpoint, info: TensorInfo, name: str, shard: ShardWriter, *, widened: bool) -> str:
    """Write the bytes of a tensor under another name, as float32 where `widened`; return the digest of the source."""
    hasher, end = new_hasher(), 0
    for _, chunk in chunks(checkpoint, info):
        hasher.update(chunk)
        data = chunk
        if widened:
            floats = widen(chunk, info.dtype)
            nonfinite = np.count_nonzero(~np.isfinite(floats))
            if nonfinite:
                raise NonFiniteError(info.name, f"{nonfinite} scales are NaN or Inf; the checkpoint is damaged")
            data = floats.view(np.uint8)
        shard.write(name, data, end)
        end += data.nbytes
    return name_digest(hasher)


def _decode(checkpoint: Checkpoint, conversion: Conversion, shard: ShardWriter) -> None:
    """Write one decoded weight, or the fused weights of all experts, each transposed."""
    start = 0
    for weight in conversion.weights:
        start += _decode_rows(checkpoint, weight, conversion, shard, start)


def _decode_rows(
    checkpoint: Checkpoint, stored: StoredWeight, conversion: Conversion, shard: ShardWriter, start: int
) -> int:
    """Write one decoded matrix from byte `start` of the output on; return the number of bytes."""
    assert conversion.output is not None
    rows, cols = stored.shape
    multiple = stored.spec.granularity.row_multiple or 1
    slab = max(SLAB_BYTES // (cols * np.dtype(np.float32).itemsize) // multiple, 1) * multiple
    if stored.expert is not None:
        slab = rows  # the matrix is transposed as a whole; one expert is small
    written = 0
    for first in range(0, rows, slab):
        values = read_rows(checkpoint, stored, first, min(first + slab, rows))
        data, nonfinite = narrow(
            np.ascontiguousarray(values.T if stored.expert is not None else values), conversion.output.dtype
        )
        if nonfinite:
            raise NonFiniteError(stored.codes, f"NaN, or values beyond the range of {conversion.output.dtype}")
        shard.write(conversion.output.name, data, start + written)
        written += data.nbytes
    return written
