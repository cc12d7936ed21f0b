"""`PagedCache`: keys and values of all layers on any device, in blocks of `BLOCK_TOKENS` tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.errors import ShapeError, lookup
from minifloat.kernels.decoder.types import BLOCK_TOKENS
from minifloat.numerics.cast import encode, torch_dtype
from minifloat.numerics.formats import E4M3

# A layer has the layout that FlashInfer calls HND. The last block belongs to no sequence: padding rows write there.
# E4M3 is stored as uint8 codes with separate scales for each head of each layer.

#: Element formats of a cache and the dtypes that store them.
ELEMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, E4M3.name: torch.uint8}


class PagedCache:
    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        blocks: int,
        element: str,
        device: torch.device,
        rows: int,
        scales: Tensor | None = None,
    ) -> None:
        dtype = lookup("element of a cache", element, ELEMENTS)
        if scales is not None and tuple(scales.shape) != (layers, 2, kv_heads):
            raise ShapeError("scales", f"expected {[layers, 2, kv_heads]}, got {list(scales.shape)}")
        self.element, self.spare = element, blocks
        # Blocks are undefined until they are written.
        self.data = torch.empty(layers, blocks + 1, 2, kv_heads, BLOCK_TOKENS, head_dim, dtype=dtype, device=device)
        self.scales = torch.ones(layers, 2, kv_heads, device=device) if scales is None else scales.to(device)
        # Finished runs of keys, zero between launches.
        self.counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)

    @staticmethod
    def bytes_per_block(layers: int, kv_heads: int, head_dim: int, element: str) -> int:
        itemsize = lookup("element of a cache", element, ELEMENTS).itemsize
        return layers * 2 * kv_heads * BLOCK_TOKENS * head_dim * itemsize

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def write(self, layer: int, cache_rows: Tensor, keys: Tensor, values: Tensor) -> None:
        block, row = (cache_rows // BLOCK_TOKENS).long(), (cache_rows % BLOCK_TOKENS).long()
        for index, x in enumerate((keys, values)):
            if self.element == E4M3.name:
                x = encode(x / self.scales[layer, index, :, None], E4M3)
            self.data[layer, :, index].transpose(1, 2)[block, row] = x.to(self.data.dtype)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, float32 ``[..., n * BLOCK_TOKENS, kv_heads, head_dim]``, in plain PyTorch."""
        keys_and_values = self.data[layer][blocks.long()].movedim(-4, 0)
        keys, values = (x.transpose(-2, -3).flatten(-4, -3) for x in keys_and_values)
        return self._decoded(keys, layer, 0), self._decoded(values, layer, 1)

    def _decoded(self, x: Tensor, layer: int, index: int) -> Tensor:
        if self.element != E4M3.name:
            return x.float()
        return x.view(torch_dtype(E4M3)).float() * self.scales[layer, index, :, None]
