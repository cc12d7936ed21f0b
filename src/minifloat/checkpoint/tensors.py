"""Records of one tensor: name, dtype, shape and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minifloat.errors import UnknownNameError

#: Bits per element of every dtype of the safetensors format, by its name in a header.
DTYPES: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

MAX_SIZE = 2**63 - 1  #: the largest extent and offset, the maximum of a signed 64-bit integer


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor and its place in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that will be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return dtype_nbytes(self.dtype, self.shape)


def dtype_nbytes(dtype: str, shape: Sequence[int]) -> int:
    if dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, DTYPES)
    bits = DTYPES[dtype]
    for extent in shape:
        bits *= extent
        if bits > MAX_SIZE:
            raise OverflowError(f"shape {list(shape)} of {dtype} exceeds 2**63 bits")
    if bits % 8:
        raise ValueError(f"shape {list(shape)} of {dtype} does not fill whole bytes")
    return bits // 8
