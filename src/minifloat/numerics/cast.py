"""Plain-torch reference of casts to and from formats of at most 8 bits; every fast kernel must equal it bit for bit.

It does not call torch's float8 casts, whose saturation depends on version and device.
"""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from minifloat.errors import UnknownNameError
from minifloat.numerics.formats import BFLOAT16, E2M1, E4M3, E5M2, E8M0, FLOAT16, FLOAT32, ElementFormat

_TORCH_DTYPES: dict[ElementFormat, torch.dtype] = {
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    E8M0: torch.float8_e8m0fnu,
    FLOAT32: torch.float32,
    BFLOAT16: torch.bfloat16,
    FLOAT16: torch.float16,
}

_SIGN_SHIFT = FLOAT32.bits - 1
_MAGNITUDE_MASK = (1 << _SIGN_SHIFT) - 1
_INF_BITS = FLOAT32.max_code + 1


def torch_dtype(fmt: ElementFormat) -> torch.dtype:
    try:
        return _TORCH_DTYPES[fmt]
    except KeyError:
        raise UnknownNameError("format with a torch dtype", fmt.name, (f.name for f in _TORCH_DTYPES)) from None


def encode(x: Tensor, fmt: ElementFormat) -> Tensor:
    """Round to the nearest value of a signed format, ties to even, clamped to the largest finite value.

    NaN becomes ``nan_code``. Codes are uint8, right-aligned, one per byte.

    Source: OFP8 1.0, section 5 (saturating); OCP MX 1.0, section 5.3.
    """
    if not fmt.signed or fmt.bits > torch.uint8.itemsize * 8:
        raise ValueError(f"encode needs a signed format of at most 8 bits, got {fmt.name}")
    bits = x.to(torch.float32).view(torch.int32)
    magnitude = bits & _MAGNITUDE_MASK
    is_nan = magnitude > _INF_BITS
    magnitude = magnitude.clamp(max=_float32_bits(fmt.max))
    code = torch.where(
        magnitude < _float32_bits(fmt.min_normal),
        _round_subnormal(magnitude, fmt),
        _round_normal(magnitude, fmt),
    )
    code = code | (((bits >> _SIGN_SHIFT) & 1) << (fmt.bits - 1))
    if fmt.nan_code is not None:
        code = torch.where(is_nan, fmt.nan_code, code)
    elif bool(is_nan.any()):
        raise ValueError(f"{fmt.name} cannot hold NaN")
    return code.to(torch.uint8)


def decode(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the exact float32 value of every uint8 code, one per byte."""
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8, got {codes.dtype}")
    table = _value_table(fmt)
    if codes.numel() and int(codes.max()) >= table.numel():
        raise ValueError(f"{fmt.name} codes are 0..{table.numel() - 1}, got {int(codes.max())}; unpack nibbles first")
    return table.to(codes.device)[codes.to(torch.int32)]


def _round_normal(magnitude: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the codes of values in the normal range, from the bits of their float32 magnitude (int32)."""
    shift = FLOAT32.mantissa_bits - fmt.mantissa_bits
    # the sum carries exactly when the tail is above half, or is half and the kept part is odd
    rounded = magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)
    return (rounded >> shift) - ((FLOAT32.bias - fmt.bias) << fmt.mantissa_bits)


def _round_subnormal(magnitude: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the codes of values below the smallest normal value, from the bits of their float32 magnitude (int32)."""
    # the last bit of this float32 weighs as much as the smallest subnormal: the addition rounds to nearest even
    magic = fmt.min_positive * (1 << FLOAT32.mantissa_bits)
    return (magnitude.view(torch.float32) + magic).view(torch.int32) - _float32_bits(magic)


def _float32_bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


@cache
def _value_table(fmt: ElementFormat) -> Tensor:
    """Return ``fmt.values`` as float32 on the CPU; callers share the tensor and must not write to it."""
    return torch.tensor(fmt.values, dtype=torch.float32)


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
