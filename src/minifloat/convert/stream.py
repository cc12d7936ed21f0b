"""Moving the bytes of one step: a chunk, or the rows of one weight, at a time."""

from __future__ import annotations

import numpy as np

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.checkpoint.digest import name_digest, new_hasher
from minifloat.checkpoint.shard import ShardWriter
from minifloat.convert.plan import Change, Step
from minifloat.convert.values import reciprocal, widen
from minifloat.errors import NonFiniteError
from minifloat.layouts import StoredWeight, read_weight
from minifloat.quantize.stream import SLAB_BYTES, chunks, copy_digest, copy_tensor


def run_step(checkpoint: Checkpoint, step: Step, shard: ShardWriter | None) -> list[str]:
    """Write the output of a step.

    Args:
        checkpoint: Where the sources are read from.
        step: What is done.
        shard: Where the output goes; None where no step of its shard writes anything.

    Returns:
        The digest of each source.

    Raises:
        NonFiniteError: NaN or Inf in a tensor that is copied or decoded, or in a scale.
    """
    info = step.sources[0]
    if shard is None or step.output is None:
        return [copy_digest(checkpoint, source) for source in step.sources]
    if step.change is Change.KEEP:
        return [copy_tensor(checkpoint, info, shard)]
    if step.change is Change.DECODE:
        digests = [copy_digest(checkpoint, source) for source in step.sources]
        _decode(checkpoint, step, shard)
        return digests
    if step.change is Change.INVERT:
        shard.write(step.output.name, reciprocal(checkpoint, info).value.reshape(1))
        return [copy_digest(checkpoint, info)]
    return [_move(checkpoint, info, step.output.name, shard, widened=step.change is Change.WIDEN)]


def _move(checkpoint: Checkpoint, info: TensorInfo, name: str, shard: ShardWriter, *, widened: bool) -> str:
    """Write the bytes of a tensor under another name, as float32 where `widened`; returns their digest."""
    hasher, end = new_hasher(), 0
    for _, chunk in chunks(checkpoint, info):
        hasher.update(chunk)
        data = chunk
        if widened:
            floats = widen(chunk, info.dtype)
            bad = np.count_nonzero(~np.isfinite(floats))
            if bad:
                raise NonFiniteError(info.name, f"{bad} scales are NaN or Inf; the checkpoint is damaged")
            data = floats.view(np.uint8)
        shard.write(name, data, end)
        end += data.nbytes
    return name_digest(hasher)


def _decode(checkpoint: Checkpoint, step: Step, shard: ShardWriter) -> None:
    """Write one dequantized weight, or the fused weights of all experts, each transposed."""
    start = 0
    for weight in step.weights:
        start += _decode_rows(checkpoint, weight, step, shard, start)


def _decode_rows(checkpoint: Checkpoint, stored: StoredWeight, step: Step, shard: ShardWriter, start: int) -> int:
    """Write one matrix from byte `start` of the output on; returns its bytes."""
    import torch

    assert step.output is not None
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[step.output.dtype]
    weight = read_weight(checkpoint, stored)
    rows, cols = stored.shape
    multiple = stored.spec.granularity.row_multiple or 1
    slab = max(SLAB_BYTES // (cols * torch.float32.itemsize) // multiple, 1) * multiple
    if stored.expert is not None:
        slab = rows  # it is turned, and one expert is small
    written = 0
    for first in range(0, rows, slab):
        part = weight.dequantize(dtype, slice(first, min(first + slab, rows)))
        if not part.isfinite().all():
            raise NonFiniteError(stored.codes, f"NaN, or values beyond the range of {step.output.dtype}")
        part = (part.T if stored.expert is not None else part).contiguous()
        data = part.view(torch.uint8).reshape(-1).numpy()
        shard.write(step.output.name, data, start + written)
        written += data.nbytes
    return written
