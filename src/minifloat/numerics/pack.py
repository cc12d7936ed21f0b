"""Two 4-bit codes per byte, the even element in the low nibble, as in compressed-tensors, ModelOpt and gpt-oss."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.numerics.formats import E2M1

_LOW_NIBBLE = (1 << E2M1.bits) - 1


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes ``[..., K]``, 0 to 15, into bytes ``[..., K / 2]``."""
    _check_bytes(codes)
    if codes.shape[-1] % 2:
        raise ValueError(f"two codes share a byte: the last dimension must be even, got {tuple(codes.shape)}")
    if codes.numel() and int(codes.max()) > _LOW_NIBBLE:
        raise ValueError(f"4-bit codes are 0..{_LOW_NIBBLE}, got {int(codes.max())}")
    return codes[..., 0::2] | codes[..., 1::2] << E2M1.bits


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo `pack_nibbles`."""
    _check_bytes(packed)
    return torch.stack((packed & _LOW_NIBBLE, packed >> E2M1.bits), dim=-1).flatten(-2)


def _check_bytes(x: Tensor) -> None:
    if x.dtype != torch.uint8 or x.ndim == 0:
        raise ValueError(f"expected uint8 of at least one dimension, got {x.dtype} {tuple(x.shape)}")
