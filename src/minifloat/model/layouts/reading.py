"""The bytes of a stored weight: `read_weight` for kernels, `read_rows` decoded a few rows at a time; numpy, no torch.

`read_rows` gives the bits of `QuantizedTensor.dequantize` in float32, without holding the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.checkpoint.tensors import DTYPES
from minifloat.errors import NonFiniteError, UnsupportedTensorError
from minifloat.model.layouts.stored import SCALE_FORMATS, StoredWeight
from minifloat.numerics.formats import E4M3, E8M0, FLOAT32, ElementFormat, IntegerFormat

if TYPE_CHECKING:
    from minifloat.numerics.tensor import QuantizedTensor


_HALF_BITS = 16  # low bits of a float32 that a bfloat16 lacks
_BYTE_BITS = 8

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def _empty(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


@cache
def value_table(element: ElementFormat) -> Floats:
    """Return the value of each code of a format of at most 8 bits; callers share the array and must not write to it."""
    return np.array(element.values, np.float32)


@cache
def _pair_table(element: ElementFormat) -> npt.NDArray[np.uint64]:
    """Return for each byte of two 4-bit codes both values, low nibble first, as the bits of two float32."""
    values = value_table(element)
    pairs = np.stack(np.broadcast_arrays(values[None, :], values[:, None]), axis=-1)
    return np.ascontiguousarray(pairs.reshape(-1, 2)).view(np.uint64).reshape(-1)


def decode_elements(codes: Bytes, element: ElementFormat, out: Floats) -> None:
    """Write the values of codes, two to a byte for formats of 4 bits (the even element in the low nibble)."""
    if element.bits * 2 == _BYTE_BITS:
        np.take(_pair_table(element), codes, out=out.view(np.uint64), mode="clip")
    else:
        np.take(value_table(element), codes, out=out, mode="clip")


def widen(data: Bytes, dtype: str) -> Floats:
    """Return scales as float32, which holds every value of their formats."""
    if dtype == "F32":
        return data.view(np.float32)
    if dtype == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << _HALF_BITS).view(np.float32)
    if dtype == "F16":
        return data.view(np.float16).astype(np.float32)
    widened: npt.NDArray[Any] = value_table(E8M0)[data]
    return widened


def narrow(values: Floats, dtype: str) -> tuple[Bytes, int]:
    """Return the bytes of float32 values in a wider or equal dtype of checkpoints, rounded to nearest, ties to even."""
    rounded: npt.NDArray[Any] = values.reshape(-1)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            rounded = rounded.astype(np.float16)
    finite = np.isfinite(rounded)
    if dtype == "BF16":
        bits = rounded.view(np.uint32)
        half = np.uint32((1 << (_HALF_BITS - 1)) - 1)
        rounded = ((bits + half + ((bits >> _HALF_BITS) & 1)) >> _HALF_BITS).astype(np.uint16)
        finite &= np.isfinite((rounded.astype(np.uint32) << _HALF_BITS).view(np.float32))
    return rounded.view(np.uint8), int(rounded.size - np.count_nonzero(finite))


#: The bit of the sign in a code of E4M3.
_SIGN = np.uint8(1 << (E4M3.bits - 1))


def read_weight(
    checkpoint: Checkpoint, stored: StoredWeight, empty: Callable[[int], Bytes] = _empty
) -> QuantizedTensor:
    """Read one quantized weight: the codes as stored, in memory from `empty`, and the scales as kernels use them."""
    import torch

    from minifloat.numerics.tensor import QuantizedTensor

    rows, _ = stored.shape
    zero_point = read_zero_points(checkpoint, stored, 0, rows)
    global_scale = read_global_scale(checkpoint, stored)
    return QuantizedTensor(
        stored.spec,
        stored.shape,
        torch.from_numpy(read_codes(checkpoint, stored, 0, rows, empty)),
        torch.from_numpy(read_scales(checkpoint, stored, 0, rows)),
        None if global_scale is None else torch.tensor(global_scale),
        stored.global_divides,
        None if zero_point is None else torch.from_numpy(zero_point),
    )


def read_rows(checkpoint: Checkpoint, stored: StoredWeight, start: int, stop: int, out: Floats | None = None) -> Floats:
    """Return the decoded rows `start` to `stop` of a weight, float32 ``[R, K]``."""
    spec, (_, cols) = stored.spec, stored.shape
    elements = np.empty((stop - start, cols), np.float32) if out is None else out
    decode_elements(read_codes(checkpoint, stored, start, stop), spec.element, elements)
    zero_points = read_zero_points(checkpoint, stored, start, stop)
    scales = read_scales(checkpoint, stored, start, stop)
    if spec.scale is not FLOAT32:
        scales = value_table(spec.scale)[scales]
    global_scale = read_global_scale(checkpoint, stored)
    if global_scale is not None:
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            scales = scales / global_scale if stored.global_divides else scales * global_scale
    block_rows, block_cols = spec.granularity.block(stored.shape)
    blocks = np.arange(start, stop) // block_rows - start // block_rows
    if zero_points is not None:
        _apply(np.subtract, elements, value_table(spec.element)[zero_points][blocks], block_cols)
    with np.errstate(over="ignore", invalid="ignore"):
        _apply(np.multiply, elements, scales[blocks], block_cols)
    return elements


def _apply(operation: np.ufunc, elements: Floats, grid: Floats, block_cols: int) -> None:
    """Apply an operation in place to elements ``[R, K]`` and a grid ``[R, blocks of columns]``."""
    rows, cols = elements.shape
    full = cols // block_cols
    whole, rest = elements[:, : full * block_cols], elements[:, full * block_cols :]
    view = whole.reshape(rows, full, block_cols)
    operation(view, grid[:, :full, None], out=view)
    if rest.size:
        operation(rest, grid[:, full:], out=rest)


def read_codes(
    checkpoint: Checkpoint,
    stored: StoredWeight,
    start: int,
    stop: int,
    empty: Callable[[int], Bytes] = _empty,
) -> Bytes:
    """Return the codes of some rows, uint8 ``[R, K]``, or ``[R, K / 2]`` where two elements share a byte."""
    info = checkpoint.tensors[stored.codes]
    rows, cols = stored.shape
    row_bytes = info.nbytes // (rows * _experts(info, stored)) if rows else 0
    first = (stored.expert or 0) * rows + start
    data = _read(checkpoint, info, first * row_bytes, (stop - start) * row_bytes, empty)
    data = data.reshape(stop - start, row_bytes)
    used = cols * stored.spec.element.bits // 8  # packs of int32 end in padding
    return data if used == row_bytes else np.ascontiguousarray(data[:, :used])


def read_scales(checkpoint: Checkpoint, stored: StoredWeight, start: int, stop: int) -> npt.NDArray[Any]:
    """Return the block scales of some rows ``[block rows, block columns]``: float32, or codes of their format."""
    info = checkpoint.tensors[stored.scale]
    if SCALE_FORMATS.get(info.dtype) is None:
        raise UnsupportedTensorError(info.name, f"expected one of {', '.join(SCALE_FORMATS)}; found {info.dtype}")
    (grid_rows, grid_cols), (block_rows, _) = (
        stored.spec.granularity.scale_shape(stored.shape),
        stored.spec.granularity.block(stored.shape),
    )
    first, end = start // block_rows, -(-stop // block_rows)
    row_bytes = grid_cols * DTYPES[info.dtype] // 8
    data = _read(checkpoint, info, ((stored.expert or 0) * grid_rows + first) * row_bytes, (end - first) * row_bytes)
    scales: npt.NDArray[Any] = data
    if stored.spec.scale is FLOAT32:
        scales = widen(data, info.dtype)
        invalid = int(scales.size - np.count_nonzero(np.isfinite(scales)))
        signed = isinstance(stored.spec.element, IntegerFormat)  # AutoRound writes negative scales of integers
        not_positive = int(np.count_nonzero(scales == 0 if signed else scales <= 0))
    else:
        nan_code = stored.spec.scale.nan_code or 0
        invalid = int(np.count_nonzero((data & nan_code) == nan_code))
        # a small block's scale may round to zero in E4M3; E8M0 has neither zero nor sign
        not_positive = int(np.count_nonzero(data & _SIGN)) if stored.spec.scale is E4M3 else 0
    if not_positive:
        raise NonFiniteError(
            stored.scale,
            f"{not_positive} of {scales.size} scales are zero or negative, and a scale is positive; the checkpoint is "
            "damaged, download it again",
        )
    if invalid:
        raise NonFiniteError(
            stored.scale, f"{invalid} of {scales.size} scales are NaN or Inf; the checkpoint is damaged"
        )
    return scales.reshape(end - first, grid_cols)


def read_global_scale(checkpoint: Checkpoint, stored: StoredWeight) -> np.float32 | None:
    if stored.global_scale is None:
        return np.float32(1) if stored.spec.has_global_scale else None  # mlx has none
    info = checkpoint.tensors[stored.global_scale]
    if SCALE_FORMATS.get(info.dtype) is not FLOAT32:
        raise UnsupportedTensorError(info.name, f"expected a float of 16 or 32 bits; found {info.dtype}")
    value = np.float32(widen(_read(checkpoint, info, 0, info.nbytes), info.dtype)[0])
    if not (np.isfinite(value) and value > 0):
        raise NonFiniteError(
            stored.global_scale, f"expected a positive, finite global scale, found {value}; the checkpoint is damaged"
        )
    return value


def read_zero_points(checkpoint: Checkpoint, stored: StoredWeight, start: int, stop: int) -> Bytes | None:
    """Return the zero points of the blocks of some rows as codes of the element's format; None if there are none."""
    if stored.zero_point is None:
        return None
    info = checkpoint.tensors[stored.zero_point]
    _, grid_cols = stored.spec.granularity.scale_shape(stored.shape)
    block_rows, _ = stored.spec.granularity.block(stored.shape)
    first, end = start // block_rows, -(-stop // block_rows)
    element = stored.spec.element
    if info.dtype == "I8":
        data = _read(checkpoint, info, first * grid_cols, (end - first) * grid_cols)
        return (data + np.uint8(element.bias)).reshape(end - first, grid_cols)
    per_word = DTYPES[info.dtype] // element.bits
    row_bytes = grid_cols * DTYPES[info.dtype] // 8
    first_word = first // per_word
    words = _read(checkpoint, info, first_word * row_bytes, (-(-end // per_word) - first_word) * row_bytes)
    packed = words.view(np.uint32).reshape(-1, 1, grid_cols)
    shifts = np.arange(0, DTYPES[info.dtype], element.bits, dtype=np.uint32)[None, :, None]
    codes = ((packed >> shifts) & np.uint32((1 << element.bits) - 1)).astype(np.uint8).reshape(-1, grid_cols)
    return codes[first - first_word * per_word :][: end - first]


def stored_ranges(checkpoint: Checkpoint, stored: StoredWeight) -> list[tuple[TensorInfo, int, int]]:
    """Return the bytes of a weight as ``(tensor, first byte, number of bytes)``; of a fused tensor its own share."""
    ranges = []
    for name in (stored.codes, stored.scale, stored.global_scale, stored.zero_point):
        if name is not None:
            info = checkpoint.tensors[name]
            share = info.nbytes // _experts(info, stored)
            ranges.append((info, (stored.expert or 0) * share, share))
    return ranges


def _experts(info: TensorInfo, stored: StoredWeight) -> int:
    return max(info.shape[0], 1) if stored.expert is not None else 1


def _read(
    checkpoint: Checkpoint, info: TensorInfo, start: int, nbytes: int, empty: Callable[[int], Bytes] = _empty
) -> Bytes:
    data = empty(nbytes)
    checkpoint.read_into(info, data, start)
    return data
