"""The bytes of a conversion: read, changed and written a chunk, or some rows of one weight, at a time."""

from __future__ import annotations

import numpy as np

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.checkpoint.digest import name_digest, new_hasher
from minifloat.checkpoint.shard import ShardWriter
from minifloat.errors import NonFiniteError
from minifloat.model.layouts.values import widen
from minifloat.quantize.convert.plan import Change, Conversion
from minifloat.quantize.convert.values import reciprocal
from minifloat.quantize.decoded import write_decoded
from minifloat.quantize.stream import chunks, copy_digest, copy_tensor


def run_conversion(checkpoint: Checkpoint, conversion: Conversion, shard: ShardWriter | None) -> list[str]:
    """Write the output of a conversion."""
    info = conversion.sources[0]
    if shard is None or conversion.output is None:
        return [copy_digest(checkpoint, source) for source in conversion.sources]
    if conversion.change is Change.KEEP:
        return [copy_tensor(checkpoint, info, shard)]
    if conversion.change is Change.DECODE:
        digests = [copy_digest(checkpoint, source) for source in conversion.sources]
        write_decoded(checkpoint, conversion.matrices, conversion.output, shard, transposed=conversion.transposed)
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
