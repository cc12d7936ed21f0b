"""Plain-torch reference of casts to and from formats of at most 8 bits; every fast kernel must equal it bit for bit.

One algorithm serves every format: it reads field widths, bias and the meaning of the all-ones exponent from the
`ElementFormat` record and works on the bits of float32, so no format has a branch of its own. It does not call
torch's float8 casts, whose saturation depends on version and device; the tests compare against them. `scale.py`
chooses scales, `pack.py` packs nibbles, and the native kernels are fast.
"""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from minifloat.errors import UnknownNameError
from minifloat.numerics.formats import BFLOAT16, E4M3, E5M2, E8M0, FLOAT16, FLOAT32, ElementFormat

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
    """Return the torch dtype that stores one element of `fmt`."""
    try:
        return _TORCH_DTYPES[fmt]
    except KeyError:
        raise UnknownNameError("format with a torch dtype", fmt.name, (f.name for f in _TORCH_DTYPES)) from None


def encode(x: Tensor, fmt: ElementFormat) -> Tensor:
    """Round every element to the nearest value of `fmt`, ties to the even code.

    Values beyond the largest finite value, Inf included, are clamped to the largest finite value. The sign of zeros,
    and of values that round to zero, is kept. NaN of either sign becomes ``fmt.nan_code``.

    Args:
        x: Any shape; float32, bfloat16 or float16 (converted to float32, which is exact). A float64 tensor would be
            rounded twice, first to float32.
        fmt: A signed format of at most 8 bits: E4M3, E5M2, E2M1.

    Returns:
        uint8 codes of the shape of `x`. Codes of fewer than 8 bits are right-aligned, one per byte.

    Source: OFP8 1.0, section 5 (saturating conversion); OCP MX 1.0, section 5.3.
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
    """Return the exact value of every code.

    Args:
        codes: uint8, any shape, one code per byte.
        fmt: Any format of at most 8 bits. E8M0 code 255 is NaN, and code 0 (2**-127) a float32 subnormal.

    Returns:
        float32 of the shape of `codes`.
    """
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8, got {codes.dtype}")
    table = _value_table(fmt)
    if codes.numel() and int(codes.max()) >= table.numel():
        raise ValueError(f"{fmt.name} codes are 0..{table.numel() - 1}, got {int(codes.max())}; unpack nibbles first")
    return table.to(codes.device)[codes.to(torch.int32)]


def _round_normal(magnitude: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the codes of values in the normal range, from the bits of their float32 magnitude (int32).

    The sum of the bits, of just under half of the last kept bit, and of the value of that bit carries exactly when the
    dropped tail is above half, or is half and the kept part is odd. A carry into the exponent gives the first value of
    the next binade, which is the correct result.
    """
    shift = FLOAT32.mantissa_bits - fmt.mantissa_bits
    rounded = magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)
    return (rounded >> shift) - ((FLOAT32.bias - fmt.bias) << fmt.mantissa_bits)


def _round_subnormal(magnitude: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the codes of values below the smallest normal value, from the bits of their float32 magnitude (int32).

    Adding the float32 whose last bit weighs as much as the smallest subnormal of `fmt` makes the float32 addition round
    to nearest even. The increase of the mantissa is the code (up to the code of the smallest normal value).
    """
    magic = fmt.min_positive * (1 << FLOAT32.mantissa_bits)
    return (magnitude.view(torch.float32) + magic).view(torch.int32) - _float32_bits(magic)


def _float32_bits(value: float) -> int:
    """Return the bit pattern of `value` as float32."""
    return int.from_bytes(struct.pack("<f", value), "little")


@cache
def _value_table(fmt: ElementFormat) -> Tensor:
    """Return ``fmt.values`` as float32 on the CPU; callers share the tensor and must not write to it."""
    return torch.tensor(fmt.values, dtype=torch.float32)
