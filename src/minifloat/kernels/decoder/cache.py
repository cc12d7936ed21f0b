"""`KVCache`: keys and values of all layers, in blocks of `BLOCK_TOKENS` tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.errors import ShapeError, lookup
from minifloat.kernels.decoder.attention import CacheShape
from minifloat.kernels.decoder.types import BLOCK_TOKENS
from minifloat.kernels.pack import allocate
from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import E4M3

# A block of one key-value head and layer is contiguous, keys before values; a layer of latent attention has keys alone.
# Keys are transposed, so that the scores of a query need no horizontal sums; values are padded to whole vectors:
#
#     float32, E4M3   keys [d][token]           values [token][padded d]
#     bfloat16        keys [d / 2][token][2]    values [token / 2][padded d][2]   the order that matrix units take

#: Element formats of a cache and the dtypes that store them.
ELEMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "E4M3": torch.uint8}
_VECTOR = 16
_UNKNOWN = -1


class KVCache:
    """The memory of a cache; blocks are undefined until a step writes them."""

    def __init__(self, shapes: Sequence[CacheShape | tuple[int, int]], blocks: int, element: str) -> None:
        for kv_heads, head_dim, *_ in shapes:
            for name, size in (("kv_heads", kv_heads), ("head_dim", head_dim)):
                if size < 1:
                    raise ShapeError(name, f"expected at least 1, got {size}")
            if head_dim % 2:
                raise ShapeError("head_dim", f"expected an even number, got {head_dim}")
        for name, size in (("layers", len(shapes)), ("blocks", blocks)):
            if size < 1:
                raise ShapeError(name, f"expected at least 1, got {size}")
        self.shapes = tuple(CacheShape(*shape) for shape in shapes)
        self.blocks, self.element = blocks, element
        sizes = [blocks * self.bytes_per_block([shape], element) for shape in shapes]
        self.data = allocate(sum(sizes))
        self._layers = [
            part.view(blocks, shape[0], -1)
            for part, shape in zip(torch.split_with_sizes(self.data, sizes), shapes, strict=True)
        ]

    @staticmethod
    def bytes_per_block(shapes: Sequence[CacheShape | tuple[int, int]], element: str) -> int:
        return elements_per_block(shapes) * lookup("element of a cache", element, ELEMENTS).itemsize

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def write(
        self, layer: int, cache_rows: Tensor, keys: Tensor, values: Tensor | None, scales: tuple[float, float]
    ) -> None:
        block, row = cache_rows // BLOCK_TOKENS, cache_rows % BLOCK_TOKENS
        key_view, value_view, pair = self._views(layer)
        key_view[block, :, :, row] = self._coded(keys, scales[0]).view(*keys.shape[:2], -1, pair)
        if values is not None:
            value_view[block, :, row // pair, : keys.shape[-1], row % pair] = self._coded(values, scales[1])

    def read(self, layer: int, blocks: Tensor, scales: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """Return keys and values, float32 ``[len(blocks) * BLOCK_TOKENS, kv_heads, head_dim]``, in plain PyTorch."""
        key_view, value_view, _ = self._views(layer)
        shape = self.shapes[layer]
        keys = self._decoded(key_view[blocks].permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1), scales[0])
        if shape.latent is not None:
            return keys, keys[..., : shape.latent]
        values = value_view[blocks].permute(0, 2, 4, 1, 3)[..., : shape.head_dim].flatten(1, 2)
        return keys, self._decoded(values.flatten(0, 1), scales[1])

    def _views(self, layer: int) -> tuple[Tensor, Tensor, int]:
        """Keys ``[blocks, kv_heads, d / pair, token, pair]`` and values ``[.., token / pair, padded d, pair]``."""
        kv_heads, d, latent = self.shapes[layer]
        padded, dtype = _padded(d), ELEMENTS[self.element]
        pair = 2 if dtype == torch.bfloat16 else 1
        data = self._layers[layer].view(dtype)
        keys, values = data[..., : BLOCK_TOKENS * d], data[..., BLOCK_TOKENS * d :]
        heads = (self.blocks, kv_heads)
        return (
            keys.view(*heads, d // pair, BLOCK_TOKENS, pair),
            values.view(*heads, BLOCK_TOKENS // pair, padded if latent is None else 0, pair),
            pair,
        )

    def _coded(self, x: Tensor, scale: float) -> Tensor:
        return encode(x / scale, E4M3) if self.element == E4M3.name else x.to(ELEMENTS[self.element])

    def _decoded(self, x: Tensor, scale: float) -> Tensor:
        return decode(x, E4M3) * scale if self.element == E4M3.name else x.float()


def elements_per_block(shapes: Sequence[CacheShape | tuple[int, int]]) -> int:
    """Return the keys and values of one block over all layers and heads, with the padding."""
    sizes = [CacheShape(*shape) for shape in shapes]
    values = [_padded(shape.head_dim) if shape.latent is None else 0 for shape in sizes]
    return sum(s.kv_heads * BLOCK_TOKENS * (s.head_dim + width) for s, width in zip(sizes, values, strict=True))


def _padded(head_dim: int) -> int:
    return -(-head_dim // _VECTOR) * _VECTOR


class SequenceStates:
    """The memory of the states of some sequences, of which each has a slot."""

    def __init__(self, floats: int, slots: int) -> None:
        for name, size in (("floats", floats), ("slots", slots)):
            if size < 1:
                raise ShapeError(name, f"expected at least 1, got {size}")
        memory = allocate(slots * floats * torch.float32.itemsize)
        self.data = memory.view(torch.float32).view(slots, floats)  # a slot never used takes no memory of the machine
        # How many tokens of its sequence each state has seen.
        self.tokens = torch.full((slots,), _UNKNOWN, dtype=torch.int32)

    @property
    def slots(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def begin(self, slots: Tensor) -> None:
        """Note that a step changes the states of some slots; they are undefined until it ends."""
        self.tokens[slots.long()] = _UNKNOWN

    def end(self, slots: Tensor, contexts: Tensor) -> None:
        """Note that a step has ended, and how many tokens of their sequences the states of some slots have seen."""
        self.tokens[slots.long()] = contexts

    def copy(self, source: int, target: int) -> None:
        """Make the state in slot `target` that in slot `source`."""
        self.data[target].copy_(self.data[source])
        self.tokens[target] = self.tokens[source]

    def check(self, slots: Sequence[int], first: Sequence[int]) -> None:
        if len(set(slots)) < len(slots):
            raise ShapeError("slots", f"expected a slot for each sequence, got {list(slots)}")
        for sequence, (slot, position) in enumerate(zip(slots, first, strict=True)):
            if not 0 <= slot < self.slots:
                raise ShapeError("slots", f"expected a slot 0 to {self.slots - 1} for sequence {sequence}, got {slot}")
            seen = int(self.tokens[slot])
            if position and seen != position:
                what = "undefined" if seen == _UNKNOWN else f"that of {seen} tokens"
                raise ShapeError(
                    "slots",
                    f"the state in slot {slot} is {what}, and sequence {sequence} continues after {position}",
                )
