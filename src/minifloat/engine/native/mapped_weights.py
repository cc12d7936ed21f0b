"""Weights of the native decoder in a file of packed weights: what is written, and what a mapped file gives back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.errors import TensorError
from minifloat.kernels.pack import PackedWeight
from minifloat.model.runtime.packed_cache import Container, Contents, UnusableCache
from minifloat.numerics.scheme import WeightSpec

_PACKED = "packed"


def contents(made: PackedWeight | Tensor) -> Contents:
    """Return a packed weight, or a contiguous tensor, as an entry of a file."""
    if isinstance(made, PackedWeight):
        return Contents(_PACKED, made.shape, made.data.numpy())
    return Contents(str(made.dtype), tuple(made.shape), made.view(torch.uint8).numpy())


class MappedWeights:
    """The weights in a mapped file, which nobody may write to."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def weight(self, name: str, spec: WeightSpec | None, shape: tuple[int, int]) -> PackedWeight:
        """Return a packed weight ``[N, K]``."""
        weight = PackedWeight(self._bytes(name, _PACKED, shape), spec, shape)
        try:
            weight.check()
        except TensorError as error:
            raise UnusableCache(f"{name}: {error}") from error
        return weight

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor."""
        return self._bytes(name, str(dtype), shape).view(dtype).reshape(shape)

    def _bytes(self, name: str, kind: str, shape: Sequence[int]) -> Tensor:
        entry = self._container.entries.get(name)
        if entry is None or (entry.kind, entry.shape) != (kind, tuple(shape)):
            raise UnusableCache(f"it has no {name} {list(shape)}, {kind}")
        with warnings.catch_warnings():
            # torch warns of memory that cannot be written, which is meant here
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._container.map, dtype=torch.uint8, offset=entry.offset, count=entry.nbytes)
