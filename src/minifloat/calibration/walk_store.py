"""What a walk over the layers of a model keeps outside of memory: hidden states, arguments, finished statistics.

Files are read and written by position. A memory map would count its pages as the process's own, and the point of
walking is that the process stays small; the page cache keeps them in memory as far as there is room.
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

from minifloat.calibration.walk import Call
from minifloat.checkpoint.files import byte_view, read_exactly, storage_errors

#: Bytes of arguments (position embeddings, masks) that stay in memory; the rest is read from a file when needed.
ARGUMENT_BYTES = 64 << 20


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a file."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.shape.numel() * self.dtype.itemsize


class TensorFile:
    """Tensors of any dtype at given places of a file. A context manager.

    Args:
        path: Created where it does not exist.

    Raises:
        StorageError: The system refuses; also from the methods.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_errors(path, "open it"):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, slot: Slot, tensor: Tensor) -> None:
        """Put a tensor, of whatever device, in its slot."""
        view, offset = _bytes(tensor.cpu()), slot.offset
        with storage_errors(self.path, "write"):
            while view:
                count = os.pwrite(self._descriptor, view, offset)
                view, offset = view[count:], offset + count

    def read(self, slot: Slot) -> Tensor:
        """The tensor in a slot, on the CPU."""
        tensor = torch.empty(slot.shape, dtype=slot.dtype)
        read_exactly(self._descriptor, _bytes(tensor), slot.offset, self.path)
        return tensor

    def sync(self) -> None:
        """Make it survive a power cut."""
        with storage_errors(self.path, "write"):
            os.fsync(self._descriptor)


class ArgumentPool:
    """The calls of all layers for all sequences, in which equal tensors are kept once.

    Sequences of one length share their position embeddings, and layers of one kind their masks, so that there is
    mostly little to keep. What exceeds `ARGUMENT_BYTES` goes to a file.

    Args:
        file: For what exceeds it.
        device: Where tensors are wanted.
    """

    def __init__(self, file: TensorFile, device: torch.device) -> None:
        self._file, self._device = file, device
        self._tensors: dict[tuple[Any, ...], Tensor | Slot] = {}
        self._calls: dict[Any, Call] = {}
        self._room = ARGUMENT_BYTES
        self._end = 0

    def keep(self, calls: Sequence[Call]) -> tuple[Call, ...]:
        """The calls of one sequence, with tensors replaced by those that are kept."""
        known: dict[int, Tensor | Slot] = {}  # layers mostly get the same object: it is hashed once

        def kept(tensor: Any) -> Any:
            if id(tensor) not in known:
                known[id(tensor)] = self._keep(tensor)
            return known[id(tensor)]

        found = []
        for call in calls:
            made = Call(_map(call.args, Tensor, kept), _map(call.kwargs, Tensor, kept), call.named)
            found.append(self._calls.setdefault((made.named, _key(made.args), _key(made.kwargs)), made))
        return tuple(found)

    def restore(self, call: Call) -> Call:
        """A call with its tensors in memory."""

        def restored(slot: Any) -> Any:
            return self._file.read(slot).to(self._device)

        return Call(_map(call.args, Slot, restored), _map(call.kwargs, Slot, restored), call.named)

    def _keep(self, tensor: Tensor) -> Tensor | Slot:
        digest = hashlib.sha256(_bytes(tensor.cpu())).digest()
        key = (tensor.dtype, tensor.shape, tensor.stride(), digest)
        if key not in self._tensors:
            if tensor.nbytes <= self._room:
                self._room -= tensor.nbytes
                self._tensors[key] = tensor
            else:
                slot = Slot(self._end, tensor.shape, tensor.dtype)
                self._file.write(slot, tensor)
                self._end = slot.end
                self._tensors[key] = slot
        return self._tensors[key]


def _map(value: Any, kind: type, function: Any) -> Any:
    """A value with everything of a class in it replaced."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {name: _map(item, kind, function) for name, item in value.items()}
    if type(value) is tuple:
        return tuple(_map(item, kind, function) for item in value)
    return value


def _key(value: Any) -> Any:
    """What tells arguments apart, whose tensors are kept: those by identity, all else by value."""
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    if isinstance(value, tuple):
        return tuple(map(_key, value))
    return id(value) if isinstance(value, Tensor) else (type(value), value)


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU; its own memory where it is contiguous."""
    return byte_view(tensor.detach().reshape(-1).view(torch.uint8).numpy())
