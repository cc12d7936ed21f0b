"""Moving one tensor from the source to the output: read a slab of rows, quantize it, write it, forget it.

Memory is a slab per thread, whatever the size of the tensor. Slabs are cut at multiples of the scheme's block rows, so
cutting never changes a bit of the result; a scheme with one scale per tensor learns its amax in a pass of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.checkpoint.shard import ShardWriter
from minifloat.errors import NonFiniteError
from minifloat.formats import E2M1, E4M3
from minifloat.kernels.quantize import amax as slab_amax
from minifloat.kernels.quantize import quantize_rows
from minifloat.quantize.digest import name_digest, new_hasher
from minifloat.quantize.plan import Part
from minifloat.quantize.roles import is_dense_float
from minifloat.quantize.stats import CastStats

#: Bytes of source that a thread holds at a time: small enough for its L2 cache, large enough to hide system calls.
SLAB_BYTES = 2 << 20

Bytes = npt.NDArray[np.uint8]

_scratch = threading.local()


def _buffer(name: str, nbytes: int) -> Bytes:
    """This thread's reusable memory: fresh pages for every slab would cost more than the cast."""
    buffer: Bytes | None = getattr(_scratch, name, None)
    if buffer is None or buffer.nbytes < nbytes:
        buffer = np.empty(nbytes, np.uint8)
        setattr(_scratch, name, buffer)
    return buffer[:nbytes]


def _slabs(checkpoint: Checkpoint, info: TensorInfo, part: Part) -> Iterator[tuple[int, int, Bytes]]:
    """The rows of a part as ``(first, last + 1, bytes)``; the bytes are valid until the next step."""
    rows, cols = part.shape
    row_bytes = cols * _itemsize(info)
    step = part.scheme.weight.granularity.row_multiple or 1
    slab_rows = max(SLAB_BYTES // max(row_bytes, 1) // step, 1) * step
    matrix = _transposed_matrix(checkpoint, info, part) if part.transposed else None
    first_byte = (part.matrix * (info.shape[-2] if len(info.shape) > 2 else 0) + part.first_row) * row_bytes
    for start in range(0, rows, slab_rows):
        stop = min(start + slab_rows, rows)
        if matrix is not None:
            yield start, stop, matrix[start:stop].reshape(-1).view(np.uint8)
            continue
        slab = _buffer("source", (stop - start) * row_bytes)
        checkpoint.read_into(info, slab, first_byte + start * row_bytes)
        yield start, stop, slab


def _transposed_matrix(checkpoint: Checkpoint, info: TensorInfo, part: Part) -> npt.NDArray[Any]:
    """The rows of a part whose source stores ``[K, all rows]``: one expert's matrix is read whole and turned."""
    _, inputs, outputs = info.shape
    itemsize = _itemsize(info)
    nbytes = inputs * outputs * itemsize
    data = _buffer("matrix", nbytes)
    checkpoint.read_into(info, data, part.matrix * nbytes)
    elements = data.view(f"u{itemsize}").reshape(inputs, outputs)
    return np.ascontiguousarray(elements[:, part.first_row : part.first_row + part.shape[0]].T)


def _itemsize(info: TensorInfo) -> int:
    return info.nbytes // max(int(np.prod(info.shape)), 1)


def part_amax(checkpoint: Checkpoint, info: TensorInfo, part: Part, impl: str) -> float:
    """The amax of a weight.

    Raises:
        NonFiniteError: NaN or Inf in it.
    """
    largest = 0.0
    for start, stop, slab in _slabs(checkpoint, info, part):
        value, nonfinite = slab_amax(slab, info.dtype, (stop - start, part.shape[1]), impl=impl)
        _refuse(info, nonfinite, start, stop)
        largest = max(largest, value)
    return largest


def part_digest(checkpoint: Checkpoint, info: TensorInfo, part: Part) -> str:
    """The digest of a weight's source, without doing anything else: what `quantize_part` returns."""
    hasher = new_hasher()
    for _, _, slab in _slabs(checkpoint, info, part):
        hasher.update(slab)
    return name_digest(hasher)


def copy_digest(checkpoint: Checkpoint, info: TensorInfo) -> str:
    """The digest of a tensor, without doing anything else: what `copy_tensor` returns."""
    hasher = new_hasher()
    for _, slab in chunks(checkpoint, info):
        hasher.update(slab)
    return name_digest(hasher)


def quantize_part(
    checkpoint: Checkpoint, info: TensorInfo, part: Part, amax: float | None, shard: ShardWriter, impl: str
) -> tuple[CastStats, str]:
    """Quantize one weight into a shard.

    Args:
        checkpoint: Where `info` is read from.
        info: The source tensor.
        part: Which weight of it, and what it becomes.
        amax: The amax of the tensor's group, where the scheme needs one.
        shard: Where the codes and scales are written.
        impl: Implementation of the cast.

    Returns:
        The error of the cast, and the digest of the bytes that were read.

    Raises:
        NonFiniteError: NaN or Inf in the weight.
    """
    spec = part.scheme.weight
    cols = part.shape[1]
    row_bytes = cols * spec.element.bits // 8
    step, _ = spec.granularity.block(part.shape)
    grid = spec.granularity.scale_shape(part.shape)
    scales = np.empty(grid, np.float32 if spec.scale.bits > 8 else np.uint8)
    stats, hasher = CastStats(), new_hasher()
    for start, stop, slab in _slabs(checkpoint, info, part):
        hasher.update(slab)
        codes = _buffer("codes", (stop - start) * row_bytes)
        result = quantize_rows(
            slab,
            info.dtype,
            (stop - start, cols),
            spec,
            tensor_amax=amax,
            impl=impl,
            out_codes=codes.reshape(stop - start, row_bytes),
        )
        _refuse(info, result.nonfinite, start, stop)
        scales[start // step : -(-stop // step)] = result.scales
        shard.write(part.tensors.codes.name, codes, start * row_bytes)
        stats += result.stats
    shard.write(part.tensors.scale.name, scales)
    if part.tensors.global_scale is not None:
        shard.write(part.tensors.global_scale.name, global_divisor(amax or 0.0).reshape(1))
    return stats, name_digest(hasher)


def copy_tensor(checkpoint: Checkpoint, info: TensorInfo, shard: ShardWriter, impl: str) -> str:
    """Copy a tensor bit for bit; a floating-point one is checked on the way. Returns the digest of its bytes.

    Raises:
        NonFiniteError: NaN or Inf in it.
    """
    hasher = new_hasher()
    for start, slab in chunks(checkpoint, info):
        hasher.update(slab)
        if is_dense_float(info):
            elements = slab.nbytes // _itemsize(info)
            _, nonfinite = slab_amax(slab, info.dtype, (1, elements), impl=impl)
            if nonfinite:
                raise NonFiniteError(info.name, f"{nonfinite} values are NaN or Inf; the checkpoint is damaged")
        shard.write(info.name, slab, start)
    return name_digest(hasher)


def chunks(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[tuple[int, Bytes]]:
    """A tensor as ``(first byte, bytes)``; the bytes are valid until the next step."""
    for start in range(0, info.nbytes, SLAB_BYTES):
        slab = _buffer("source", min(SLAB_BYTES, info.nbytes - start))
        checkpoint.read_into(info, slab, start)
        yield start, slab


def _refuse(info: TensorInfo, nonfinite: int, start: int, stop: int) -> None:
    if nonfinite:
        raise NonFiniteError(
            info.name, f"{nonfinite} values in rows {start} to {stop - 1} are NaN or Inf; the checkpoint is damaged"
        )


def global_divisor(amax: float) -> np.float32:
    """The float32 that NVFP4's block scales are divided by: `quantize.scale.global_divisor`, without torch."""
    clamped = max(np.float32(amax), np.finfo(np.float32).tiny)
    with np.errstate(over="ignore"):
        quotient = np.float32(1.0) / clamped * np.float32(E4M3.max * E2M1.max)
    return quotient if np.isfinite(quotient) else np.float32(1.0)
