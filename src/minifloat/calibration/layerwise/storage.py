"""Tensors that a layer-by-layer run keeps on disk: hidden states, and the arguments of layers that exceed memory.

Files are read and written by position instead of through a memory map, whose pages would count as memory of the
process. The page cache of the system keeps them in memory as far as there is room.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minifloat.calibration.layerwise.calls import LayerCall
from minifloat.checkpoint.files import byte_view, read_exactly, storage_errors

#: Bytes of arguments (position embeddings, masks) that stay in memory; a file holds the others.
ARGUMENT_BYTES = 64 << 20


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor in a file: byte offset, shape and dtype."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """Offset of the first byte after the tensor."""
        return self.offset + self.shape.numel() * self.dtype.itemsize


class TensorFile:
    """A file of tensors of any dtype at known locations. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path, self._end = path, 0
        with storage_errors(path, "open it"):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def reserve(self, tensor: Tensor) -> StoredTensor:
        """Return the location of a tensor behind those of earlier calls, without writing it."""
        location = StoredTensor(self._end, tensor.shape, tensor.dtype)
        self._end = location.end
        return location

    def append(self, tensor: Tensor) -> StoredTensor:
        """Write a tensor behind those of earlier calls, and return its location."""
        location = self.reserve(tensor)
        self.write(location, tensor)
        return location

    def write(self, location: StoredTensor, tensor: Tensor) -> None:
        """Write a tensor, on any device, to its location."""
        view, offset = _bytes(tensor.cpu()), location.offset
        with storage_errors(self.path, "write"):
            while view:
                count = os.pwrite(self._descriptor, view, offset)
                view, offset = view[count:], offset + count

    def read(self, location: StoredTensor) -> Tensor:
        tensor = torch.empty(location.shape, dtype=location.dtype)
        read_exactly(self._descriptor, _bytes(tensor), location.offset, self.path)
        return tensor

    def sync(self) -> None:
        """Flush the file to the disk, so that it survives a power cut."""
        with storage_errors(self.path, "write"):
            os.fsync(self._descriptor)


class ArgumentPool:
    """The calls of all layers for all batches, with each distinct tensor kept once."""

    def __init__(self, file: TensorFile, device: torch.device) -> None:
        self._file, self._device = file, device
        self._tensors: dict[tuple[Any, ...], Tensor | StoredTensor] = {}
        self._calls: dict[Any, LayerCall] = {}
        self._free_bytes = ARGUMENT_BYTES

    def keep(self, calls: Sequence[LayerCall]) -> tuple[LayerCall, ...]:
        """Return the calls of one batch with each tensor replaced by the pool's equal tensor or its location."""
        pooled: dict[int, Tensor | StoredTensor] = {}  # layers mostly share one object, which is then hashed once

        def pool(tensor: Any) -> Any:
            if id(tensor) not in pooled:
                pooled[id(tensor)] = self._keep(tensor)
            return pooled[id(tensor)]

        kept = []
        for call in calls:
            pooled_call = LayerCall(_map(call.args, Tensor, pool), _map(call.kwargs, Tensor, pool), call.named)
            key = (pooled_call.named, _key(pooled_call.args), _key(pooled_call.kwargs))
            kept.append(self._calls.setdefault(key, pooled_call))
        return tuple(kept)

    def restore(self, call: LayerCall, *, for_backward: bool = False) -> LayerCall:
        """Return a kept call with all of its tensors in memory; `for_backward`: as copies that autograd can save."""
        if for_backward:  # the tensors of a call were made in inference mode
            call = LayerCall(_map(call.args, Tensor, Tensor.clone), _map(call.kwargs, Tensor, Tensor.clone), call.named)

        def load(location: Any) -> Any:
            return self._file.read(location).to(self._device)

        return LayerCall(_map(call.args, StoredTensor, load), _map(call.kwargs, StoredTensor, load), call.named)

    def _keep(self, tensor: Tensor) -> Tensor | StoredTensor:
        digest = hashlib.sha256(_bytes(tensor.cpu())).digest()
        key = (tensor.dtype, tensor.shape, tensor.stride(), digest)
        if key not in self._tensors:
            if tensor.nbytes <= self._free_bytes:
                self._free_bytes -= tensor.nbytes
                self._tensors[key] = tensor
            else:
                self._tensors[key] = self._file.append(tensor)
        return self._tensors[key]


def _map(value: Any, kind: type, function: Any) -> Any:
    """Return a nested value with `function` applied to every instance of `kind` in it."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {name: _map(item, kind, function) for name, item in value.items()}
    if type(value) is tuple:
        return tuple(_map(item, kind, function) for item in value)
    return value


def _key(value: Any) -> Any:
    """Return a hashable key of pooled arguments: the pool's tensors by identity, all other values by value."""
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    if isinstance(value, tuple):
        return tuple(map(_key, value))
    return id(value) if isinstance(value, Tensor) else (type(value), value)


def _bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, without a copy if it is contiguous."""
    return byte_view(tensor.detach().reshape(-1).view(torch.uint8).numpy())
