"""Codes and scales of MXFP4 and NVFP4 in ggml's blocks: the same bits in another order, and back.

Source: ggml, ``ggml-common.h`` (`block_mxfp4`, `block_nvfp4`). The scale bytes of a block come first. Its codes are in
groups with one scale; byte j of a group holds element j in the low nibble, and in the high one the element half a group
later. llama.cpp doubles the values of codes and halves those of scales, so that products are those of checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from minifloat.model.layouts.reading import Bytes
from minifloat.numerics.scheme import SCHEMES, WeightSpec


class Blocks(NamedTuple):
    """A block format of ggml that holds E2M1 codes."""

    name: str  #: of the type in gguf
    spec: WeightSpec  #: of the weights that it holds
    groups: int  #: groups in a block

    @property
    def group(self) -> int:
        """Elements with one scale."""
        return self.spec.granularity.block((1, 1))[1]

    @property
    def elements(self) -> int:
        return self.group * self.groups

    @property
    def nbytes(self) -> int:
        return self.groups + self.elements // 2

    def pack(self, codes: Bytes, scales: Bytes) -> Bytes:
        """Return the blocks, uint8 ``[R, bytes]``, of codes ``[R, K / 2]`` (even elements low) and scales."""
        rows, count = len(codes), codes.shape[1] * 2 // self.elements
        pairs = codes.reshape(rows, count, self.groups, self.group // 2)
        elements = np.stack([pairs & 0xF, pairs >> 4], axis=-1).reshape(rows, count, self.groups, 2, self.group // 2)
        packed = (elements[..., 0, :] | elements[..., 1, :] << 4).reshape(rows, count, -1)
        return np.concatenate([scales.reshape(rows, count, self.groups), packed], axis=-1).reshape(rows, -1)

    def unpack(self, blocks: Bytes) -> tuple[Bytes, Bytes]:
        """Return codes and scales, as `pack` takes them."""
        rows = len(blocks)
        parts = blocks.reshape(rows, -1, self.nbytes)
        packed = parts[..., self.groups :].reshape(rows, -1, self.group // 2)
        elements = np.concatenate([packed & 0xF, packed >> 4], axis=-1).reshape(rows, -1, 2)
        return elements[..., 0] | elements[..., 1] << 4, parts[..., : self.groups].reshape(rows, -1)


MXFP4 = Blocks("MXFP4", SCHEMES["mxfp4"].weight, 1)
NVFP4 = Blocks("NVFP4", SCHEMES["nvfp4"].weight, 4)
BLOCKS = (MXFP4, NVFP4)


def blocks_of(spec: WeightSpec) -> Blocks | None:
    """Return the blocks that hold the codes and scales of a weight; None where ggml has none."""
    return next((blocks for blocks in BLOCKS if replace(blocks.spec, rule=spec.rule) == spec), None)
