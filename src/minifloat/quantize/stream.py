"""The streaming cast of one tensor: read a slab of rows, quantize it and write it, then read the next slab.

Memory is a slab per thread, whatever the size of the tensor.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint, OutputTensor, TensorInfo
from minifloat.checkpoint.files import Hasher, byte_view, name_digest, new_hasher
from minifloat.checkpoint.shard import ShardWriter
from minifloat.errors import KernelUnavailable, NonFiniteError, UsageError
from minifloat.kernels.quantize import amax as slab_amax
from minifloat.kernels.quantize import quantize_rows, why_not
from minifloat.model.architecture.roles import is_dense_float
from minifloat.model.layouts import StoredWeight
from minifloat.model.layouts.decoded import DecodedCheckpoint
from minifloat.model.layouts.reading import narrow, read_rows
from minifloat.model.plan.tensor_plan import Part
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.divisor import scalar_global_divisor
from minifloat.numerics.scheme import Scheme
from minifloat.quantize.nonfinite import Copied
from minifloat.quantize.quantized_source import stored_digest

if TYPE_CHECKING:
    from minifloat.quantize.rounding.rounded_model import RoundedModel


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
    """Write a decoded matrix, or the fused matrices of all experts."""
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


#: Bytes of source that a thread holds at a time: small enough for its L2 cache, large enough to hide system calls.
SLAB_BYTES = 2 << 20
#: Bytes of source per thread where a GPU casts: a launch and two copies must take little time beside reading the slab.
DEVICE_SLAB_BYTES = 16 << 20

Bytes = npt.NDArray[np.uint8]

_scratch = threading.local()


@dataclass(frozen=True)
class Caster:
    """The implementation and the device that cast slabs, with the host memory that holds them."""

    impl: str = "auto"
    device: str = "cpu"

    @classmethod
    def of(cls, device: str, impl: str = "auto") -> Caster:
        """Return the caster of a device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``."""
        kind, colon, index = device.partition(":")
        if kind not in ("cpu", "cuda") or (colon and not (kind == "cuda" and index.isdecimal())):
            raise UsageError(f"weights are cast on cpu, cuda or cuda:N, not on {device!r}")
        if kind == "cuda" and impl not in ("auto", "triton"):
            raise UsageError(f"impl {impl!r} casts on the CPU, not on {device}")
        return cls("triton" if kind == "cuda" else impl, device)

    def require(self, schemes: Iterable[Scheme]) -> None:
        """Raise an error if a GPU cannot cast to one of these schemes, before anything is written."""
        for scheme in schemes if self.impl == "triton" else ():
            reason = why_not(self.impl, scheme.weight, self.device)
            if reason:
                raise KernelUnavailable(f"{scheme.name} cannot be cast on {self.device}: {reason}")

    @property
    def slab_bytes(self) -> int:
        """Approximate bytes of source that a thread holds at a time."""
        return DEVICE_SLAB_BYTES if self.impl == "triton" else SLAB_BYTES

    def buffer(self, name: str, nbytes: int) -> Bytes:
        """Return reusable memory of this thread: fresh pages for every slab would cost more than the cast."""
        buffer: Bytes | None = getattr(_scratch, f"{self.device} {name}", None)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._allocate(nbytes)
            setattr(_scratch, f"{self.device} {name}", buffer)
        return buffer[:nbytes]

    def _allocate(self, nbytes: int) -> Bytes:
        if self.impl != "triton":
            return np.empty(nbytes, np.uint8)
        from minifloat.kernels.quantize import triton  # imports torch and triton

        return triton.host_buffer(nbytes, self.device)


#: The caster for copies, digests and casts without a GPU.
CPU = Caster()


def _slabs(checkpoint: Checkpoint, info: TensorInfo, part: Part, caster: Caster) -> Iterator[tuple[int, int, Bytes]]:
    """Yield the rows of a part as ``(first, last + 1, bytes)``; the bytes are valid until the next slab."""
    rows, cols = part.shape
    height = rows // part.matrices
    step = part.scheme.weight.granularity.row_multiple or 1
    slab_rows = max(caster.slab_bytes // max(cols * _itemsize(info), 1) // step, 1) * step
    for number in range(part.matrices):
        read = _row_reader(checkpoint, info, part, part.matrix + number, caster)
        for start in range(0, height, slab_rows):
            stop = min(start + slab_rows, height)
            yield number * height + start, number * height + stop, read(start, stop)


def _row_reader(
    checkpoint: Checkpoint, info: TensorInfo, part: Part, matrix: int, caster: Caster
) -> Callable[[int, int], Bytes]:
    row_bytes = part.shape[1] * _itemsize(info)
    if _is_decoded(checkpoint, info):

        def decode(start: int, stop: int) -> Bytes:
            slab = caster.buffer("source", (stop - start) * row_bytes)
            out = slab.view(np.float32).reshape(stop - start, part.shape[1])
            checkpoint.read_rows(info, matrix, part.first_row + start, part.first_row + stop, out)
            return slab

        return decode
    if part.transposed:
        transposed = _transposed_matrix(checkpoint, info, part, matrix, caster)
        return lambda start, stop: transposed[start:stop].reshape(-1).view(np.uint8)
    first_byte = (matrix * (info.shape[-2] if len(info.shape) > 2 else 0) + part.first_row) * row_bytes

    def read(start: int, stop: int) -> Bytes:
        slab = caster.buffer("source", (stop - start) * row_bytes)
        checkpoint.read_into(info, slab, first_byte + start * row_bytes)
        return slab

    return read


def _is_decoded(checkpoint: Checkpoint, info: TensorInfo) -> TypeGuard[DecodedCheckpoint]:
    """Return whether the source stores a tensor quantized."""
    return isinstance(checkpoint, DecodedCheckpoint) and info.name in checkpoint.weights


def _transposed_matrix(
    checkpoint: Checkpoint, info: TensorInfo, part: Part, matrix: int, caster: Caster
) -> npt.NDArray[Any]:
    """Return the rows of a part whose source stores ``[K, all rows]``: one expert's matrix, transposed."""
    _, inputs, outputs = info.shape
    itemsize = _itemsize(info)
    nbytes = inputs * outputs * itemsize
    data = caster.buffer("matrix", nbytes)
    checkpoint.read_into(info, data, matrix * nbytes)
    elements = data.view(f"u{itemsize}").reshape(inputs, outputs)
    height = part.shape[0] // part.matrices
    return np.ascontiguousarray(elements[:, part.first_row : part.first_row + height].T)


def _itemsize(info: TensorInfo) -> int:
    return info.nbytes // max(int(np.prod(info.shape)), 1)


def part_amax(checkpoint: Checkpoint, info: TensorInfo, part: Part, caster: Caster) -> float:
    largest = 0.0
    for start, stop, slab in _slabs(checkpoint, info, part, caster):
        shape = (stop - start, part.shape[1])
        value, nonfinite = slab_amax(slab, info.dtype, shape, impl=caster.impl, device=caster.device)
        _refuse(info, nonfinite, start, stop)
        largest = max(largest, value)
    return largest


def part_digest(checkpoint: Checkpoint, info: TensorInfo, part: Part) -> str:
    """Return the digest of a weight's source that `quantize_part` returns, without quantizing it."""
    if _is_decoded(checkpoint, info):
        return stored_digest(checkpoint, info, part)
    hasher = new_hasher()
    for _, _, slab in _slabs(checkpoint, info, part, CPU):
        hasher.update(slab)
    return name_digest(hasher)


def copy_digest(checkpoint: Checkpoint, info: TensorInfo) -> str:
    hasher = new_hasher()
    for slab in _source_chunks(checkpoint, info):
        hasher.update(slab)
    return name_digest(hasher)


class HashedReads(Checkpoint):
    """A view of a checkpoint that hashes the tensors that are read through it from the first byte to the last."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.__dict__ |= checkpoint.__dict__
        self._read_through = checkpoint
        self._hashed: dict[str, tuple[Hasher, int]] = {}

    def read_into(self, info: TensorInfo, buffer: memoryview | Bytes, start: int = 0) -> None:
        self._read_through.read_into(info, buffer, start)
        hasher, end = self._hashed.get(info.name) or (new_hasher(), 0)
        if start == end:
            hasher.update(buffer)
            self._hashed[info.name] = hasher, end + len(byte_view(buffer))

    def digest(self, info: TensorInfo) -> str:
        """Return what `copy_digest` returns; a tensor that was not read in whole is read now."""
        hasher, end = self._hashed.get(info.name) or (new_hasher(), 0)
        return name_digest(hasher) if end == info.nbytes else copy_digest(self._read_through, info)


def quantize_part(
    checkpoint: Checkpoint, info: TensorInfo, part: Part, amax: float | None, shard: ShardWriter, caster: Caster
) -> tuple[CastStats, str]:
    spec = part.scheme.weight
    cols = part.shape[1]
    row_bytes = cols * spec.element.bits // 8
    step, _ = spec.granularity.block(part.shape)
    _, grid_cols = spec.granularity.scale_shape(part.shape)
    stats, hasher, decoded = CastStats(), new_hasher(), _is_decoded(checkpoint, info)
    for start, stop, slab in _slabs(checkpoint, info, part, caster):
        if not decoded:
            hasher.update(slab)
        codes = caster.buffer("codes", (stop - start) * row_bytes)
        result = quantize_rows(
            slab,
            info.dtype,
            (stop - start, cols),
            spec,
            tensor_amax=amax,
            impl=caster.impl,
            device=caster.device,
            out=(codes.reshape(stop - start, row_bytes), None),
        )
        _refuse(info, result.nonfinite, start, stop)
        shard.write(part.tensors.codes.name, codes, start * row_bytes)
        if start % step == 0:  # one scale of the whole tensor is the same in every slab
            itemsize = result.scales.dtype.itemsize
            shard.write(part.tensors.scale.name, result.scales, start // step * grid_cols * itemsize)
        stats += result.stats
    if part.tensors.global_scale is not None:
        shard.write(part.tensors.global_scale.name, scalar_global_divisor(amax or 0.0).reshape(1))
    return stats, part_digest(checkpoint, info, part) if decoded else name_digest(hasher)


def write_rounded_part(
    checkpoint: Checkpoint, info: TensorInfo, part: Part, shard: ShardWriter, rounded: RoundedModel
) -> tuple[CastStats, str]:
    """Write the codes and scales of a weight that were chosen with data, and return what `quantize_part` returns."""
    for output in part.tensors.all:
        shard.write(output.name, rounded.read(output.name))
    return CastStats(**rounded.weights[part.module]["stats"]), part_digest(checkpoint, info, part)


def write_rounded_copy(checkpoint: Checkpoint, info: TensorInfo, shard: ShardWriter, rounded: RoundedModel) -> Copied:
    """Write a tensor that stays in 16 bits with the scales that were folded into it."""
    shard.write(info.name, rounded.read(info.name))
    return Copied(copy_digest(checkpoint, info))


def dequantize_copy(checkpoint: DecodedCheckpoint, info: TensorInfo, dtype: str, shard: ShardWriter) -> Copied:
    """Write a tensor that the source stores quantized in 16 or 32 bits; the digest is that of codes and scales."""
    weights = checkpoint.weights[info.name]
    output = OutputTensor(info.name, dtype, info.shape)
    matrices = [(weight,) for weight in weights]
    write_decoded(checkpoint.stored, matrices, output, shard, transposed=weights[0].expert is not None)
    return Copied(copy_digest(checkpoint, info))


def copy_tensor(
    checkpoint: Checkpoint,
    info: TensorInfo,
    shard: ShardWriter,
    caster: Caster = CPU,
    *,
    allowed: Collection[str] = (),
) -> Copied:
    """Copy a tensor bit for bit; only the tensors of `allowed` may hold NaN or Inf."""
    hasher, found = new_hasher(), 0
    for start, slab in chunks(checkpoint, info, caster):
        hasher.update(slab)
        if is_dense_float(info):
            elements = slab.nbytes // _itemsize(info)
            _, nonfinite = slab_amax(slab, info.dtype, (1, elements), impl=caster.impl, device=caster.device)
            if nonfinite and info.name not in allowed:
                raise NonFiniteError(
                    info.name,
                    f"{nonfinite} values are NaN or Inf; the checkpoint is damaged, or the model does not read this "
                    f"tensor: then copy it as it is with --allow-nonfinite '^{re.escape(info.name)}$'",
                )
            found += nonfinite
        shard.write(info.name, slab, start)
    return Copied(name_digest(hasher), found)


def chunks(checkpoint: Checkpoint, info: TensorInfo, caster: Caster = CPU) -> Iterator[tuple[int, Bytes]]:
    """Yield a tensor as ``(first byte, bytes)``; the bytes are valid until the next chunk."""
    for start in range(0, info.nbytes, caster.slab_bytes):
        slab = caster.buffer("source", min(caster.slab_bytes, info.nbytes - start))
        checkpoint.read_into(info, slab, start)
        yield start, slab


def _source_chunks(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[Bytes]:
    if _is_decoded(checkpoint, info):
        yield from checkpoint.stored_chunks(info, 0, len(checkpoint.weights[info.name]), SLAB_BYTES)
    else:
        yield from (slab for _, slab in chunks(checkpoint, info))


def _refuse(info: TensorInfo, nonfinite: int, start: int, stop: int) -> None:
    if nonfinite:
        raise NonFiniteError(
            info.name, f"{nonfinite} values in rows {start} to {stop - 1} are NaN or Inf; the checkpoint is damaged"
        )
