"""What `inspect` says: bytes by kind and format, every tensor, and for `--plot` magnitudes of weights and scales.

Magnitudes come from a sample of the first rows of every weight.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.checkpoint.hub import model_folder
from minifloat.model.layouts import describe
from minifloat.model.layouts.inspection import Inspection, TensorRow, format_name, inspect_opened
from minifloat.model.layouts.reading import read_codes, read_rows, read_scales, value_table, widen
from minifloat.model.layouts.stored import Description, StoredWeight
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.histogram import BINS, bin_edges, count_magnitudes, octaves
from minifloat.report.document import (
    Axis,
    Bar,
    Bars,
    Column,
    Document,
    Figure,
    Folded,
    Lines,
    On,
    Section,
    Series,
    Table,
    Text,
    columns,
    section,
)
from minifloat.report.text import format_number, layer_pattern, shape_text, size_text

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


_LEAST_DRAWN = 1e-5  #: share of an octave at the ends of a histogram below which it is not drawn


def inspected_document(path: str | os.PathLike[str], *, revision: str | None = None) -> Document:
    """Return the document of a checkpoint with the magnitudes of its weights; a sample of each weight is read."""
    with Checkpoint.open(model_folder(path, revision=revision)) as checkpoint:
        description = describe(checkpoint)
        inspection = inspect_opened(path, checkpoint, description)
        return document(inspection, sample_magnitudes(checkpoint, description))


def document(
    inspection: Inspection, magnitudes: Mapping[str, Magnitudes] | None = None, *, verbose: bool = False
) -> Document:
    """Return architecture and layout, the bytes, then a row per tensor, or one for all layers unless `verbose`."""
    bits = inspection.quantized_bits_per_weight
    quantized = "" if math.isnan(bits) else f"; quantized weights alone {bits:.2f}"
    kv_cache = f", KV cache {inspection.kv_cache}" if inspection.kv_cache else ""
    ignored = f"Not named by the index, ignored: {', '.join(inspection.ignored_files)}"
    return Document(
        f"What the checkpoint holds: {Path(inspection.path).name}",
        [
            section(
                "Checkpoint",
                Text(f"{inspection.path}: {inspection.architecture}, {inspection.shards} file(s)"),
                Text(f"layout: {inspection.layout or 'not quantized'}{kv_cache}"),
                Text(
                    f"{inspection.elements:,} weights, {size_text(inspection.nbytes)}, "
                    f"{inspection.bits_per_weight:.2f} bits per weight{quantized}"
                ),
            ),
            _bytes_section(inspection, "kind"),
            _bytes_section(inspection, "format"),
            _magnitude_section(magnitudes or {}),
            _scale_section(magnitudes or {}),
            section("Tensors", Folded("All tensors", [_tensor_table(inspection.rows, verbose=verbose)])),
            section("", Text(ignored if inspection.ignored_files else "")),
        ],
    )


def _bytes_section(inspection: Inspection, attribute: str) -> Section:
    total = max(inspection.nbytes, 1)
    rows, bars = [], []
    for name, (count, elements, nbytes) in inspection.by(attribute).items():
        share = f"{nbytes / total:.1%}"
        rows.append([name, f"{count:,}", f"{elements:,}", size_text(nbytes), share])
        bars.append(Bar(name, nbytes / total, share))
    return section(
        f"Bytes by {attribute}",
        Table(columns(attribute, "tensors", "weights", "bytes", "share"), rows),
        Figure(f"Share of the bytes by {attribute}", Bars(bars, Axis("share of the bytes", percent=True))),
    )


def _tensor_table(rows: tuple[TensorRow, ...], *, verbose: bool) -> Table:
    groups: dict[tuple[str, str, str], list[TensorRow]] = {}
    for row in rows:
        groups.setdefault((row.name if verbose else layer_pattern(row.name), row.kind, row.format), []).append(row)
    words = (Column(name, left=True) for name in ("shape", "kind", "format"))
    return Table(
        columns("tensor", "count", *words, "bytes"),
        [
            [name, str(len(rows)), shape_text({row.shape for row in rows}), kind, element_format, _size_of(rows)]
            for (name, kind, element_format), rows in groups.items()
        ],
    )


def _size_of(rows: list[TensorRow]) -> str:
    return size_text(sum(row.nbytes for row in rows))


def _magnitude_section(magnitudes: Mapping[str, Magnitudes]) -> Section:
    rows = [
        [
            name,
            f"{entry.weights:,}",
            f"{entry.elements:,}",
            _reach(entry.histogram),
            _share(entry.zeros, entry.elements),
            _share(entry.largest, entry.elements) if entry.scales.any() else "",
        ]
        for name, entry in magnitudes.items()
        if entry.elements
    ]
    names = ("format", "weights", "sampled elements", "middle 98% of magnitudes", "zero", "largest code")
    return _histogram_section(
        "Magnitudes of the weights",
        Table(columns(*names), rows),
        "A sample of the first rows of every weight, decoded. Zeros are not drawn.",
        _octaves_figure("Magnitudes of the weights, by octave", magnitudes, lambda entry: entry.histogram, "elements"),
    )


def _scale_section(magnitudes: Mapping[str, Magnitudes]) -> Section:
    scaled = {name: entry for name, entry in magnitudes.items() if entry.scales.any()}
    rows = [[name, f"{int(entry.scales.sum()):,}", *_ends(entry.scales)] for name, entry in scaled.items()]
    return _histogram_section(
        "Scales",
        Table(columns("format", "sampled scales", "smallest", "median", "largest"), rows),
        "Scales as they are stored; a global scale (NVFP4) is not part of them. Magnitudes are rounded down to bins.",
        _octaves_figure("Scales of the blocks, by octave", scaled, lambda entry: entry.scales, "scales"),
    )


def _histogram_section(title: str, table: Table, note: str, figure: Figure) -> Section:
    return section(title, *((table, Text(note), figure) if table.rows else ()), on=On.PAGE)


def _octaves_figure(
    caption: str,
    magnitudes: Mapping[str, Magnitudes],
    counts: Callable[[Magnitudes], npt.NDArray[np.int64]],
    what: str,
) -> Figure:
    series = [Series(name, _drawn(counts(entry))) for name, entry in magnitudes.items()]
    x = Axis("scale" if what == "scales" else "magnitude", log=True)
    return Figure(caption, Lines(series, x, Axis(f"share of the {what}", percent=True, low=0.0)))


def _drawn(counts: npt.NDArray[np.int64]) -> list[tuple[float, float]]:
    """Return the octaves, from the first to the last that is not all but empty."""
    points = octaves(counts)
    used = [index for index, (_, share) in enumerate(points) if share > _LEAST_DRAWN]
    return points[used[0] : used[-1] + 1] if used else []


def _ends(counts: npt.NDArray[np.int64]) -> list[str]:
    """Return the smallest, the median and the largest magnitude, as starts of bins."""
    return [format_number(_quantile(counts, fraction)) for fraction in (0.0, 0.5, 1.0)]


def _reach(counts: npt.NDArray[np.int64]) -> str:
    nonzero = counts.copy()
    nonzero[0] = 0
    if not nonzero.any():
        return "all 0"
    return " to ".join(format_number(float(f"{_quantile(nonzero, fraction):.2g}")) for fraction in (0.01, 0.99))


def _quantile(counts: npt.NDArray[np.int64], fraction: float) -> float:
    total = counts.cumsum()
    return float(bin_edges()[int(np.searchsorted(total, max(fraction * total[-1], 1)))])


def _share(count: int, of: int) -> str:
    return f"{count / max(of, 1):.2%}"
