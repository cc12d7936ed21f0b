"""Magnitudes of weights and scales by format, from a sample of rows of every weight; `inspect --plot` draws them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.model.layouts.inspection import format_name
from minifloat.model.layouts.reading import read_codes, read_rows, read_scales
from minifloat.model.layouts.stored import Description, StoredWeight
from minifloat.model.layouts.values import value_table, widen
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.histogram import BINS, count_magnitudes

#: Elements that are read of each weight, in whole rows.
SAMPLE = 1 << 16
#: Dtypes of unquantized weights.
_FLOATS = ("BF16", "F16", "F32")
_MATRIX = 2


@dataclass
class Magnitudes:
    """The sampled weights of one format."""

    weights: int = 0
    elements: int = 0
    zeros: int = 0
    largest: int = 0
    histogram: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    scales: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))


def sample_magnitudes(checkpoint: Checkpoint, description: Description) -> dict[str, Magnitudes]:
    """Return the magnitudes by format: quantized weights first, then the dtypes of other matrices."""
    found: dict[str, Magnitudes] = {}
    for stored in description.weights.values():
        _add_quantized(found.setdefault(format_name(stored.spec, stored.activation), Magnitudes()), checkpoint, stored)
    for info in _plain_matrices(checkpoint, description):
        entry = found.setdefault(info.dtype, Magnitudes())
        values = _first_rows(checkpoint, info)
        entry.weights += 1
        entry.elements += values.size
        entry.zeros += int(np.count_nonzero(values == 0))
        entry.histogram += count_magnitudes(values[np.isfinite(values)])
    return found


def _add_quantized(entry: Magnitudes, checkpoint: Checkpoint, stored: StoredWeight) -> None:
    rows = _sampled_rows(stored.shape)
    values = read_rows(checkpoint, stored, 0, rows)
    scales = read_scales(checkpoint, stored, 0, rows)
    if stored.spec.scale is not FLOAT32:
        scales = value_table(stored.spec.scale)[scales]
    entry.weights += 1
    entry.elements += values.size
    entry.zeros += int(np.count_nonzero(values == 0))
    entry.largest += _count_largest(stored, read_codes(checkpoint, stored, 0, rows))
    entry.histogram += count_magnitudes(values[np.isfinite(values)])
    entry.scales += count_magnitudes(np.ascontiguousarray(scales, np.float32))


def _count_largest(stored: StoredWeight, codes: npt.NDArray[np.uint8]) -> int:
    """Return the number of elements with the largest magnitude of the format."""
    element = stored.spec.element
    table = np.abs(np.array(element.values))
    is_largest = table == np.nanmax(np.where(np.isinf(table), 0, table))
    bits = element.bits
    if bits == 8:
        return int(np.count_nonzero(is_largest[codes]))
    mask = (1 << bits) - 1
    return int(np.count_nonzero(is_largest[codes & mask]) + np.count_nonzero(is_largest[codes >> bits & mask]))


def _plain_matrices(checkpoint: Checkpoint, description: Description) -> Iterator[TensorInfo]:
    used = {name for stored in description.weights.values() for name in stored.tensors}
    for name, info in checkpoint.tensors.items():
        is_matrix = len(info.shape) == _MATRIX and info.dtype in _FLOATS
        if is_matrix and name not in used and name not in description.auxiliary:
            yield info


def _first_rows(checkpoint: Checkpoint, info: TensorInfo) -> npt.NDArray[np.float32]:
    rows = _sampled_rows((info.shape[0], info.shape[1]))
    data = np.empty(info.nbytes // max(info.shape[0], 1) * rows, np.uint8)
    checkpoint.read_into(info, data)
    return np.ascontiguousarray(widen(data, info.dtype), np.float32)


def _sampled_rows(shape: tuple[int, int]) -> int:
    return min(shape[0], max(SAMPLE // max(shape[1], 1), 1))
