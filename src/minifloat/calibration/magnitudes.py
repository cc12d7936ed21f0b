"""The parts of the page on activation statistics that show single elements: their magnitudes, and their channels.

Magnitudes come from histograms (``calibrate --histogram``, or held-out text), channels from
``calibrate --per-channel``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from minifloat.calibration.stats import ActivationStats, ModuleStats
from minifloat.calibration.summary import InputSummary
from minifloat.numerics.formats import E4M3
from minifloat.numerics.histogram import BINS_PER_OCTAVE, FINITE_BINS, bin_edges, octaves
from minifloat.report.document import (
    Axis,
    Figure,
    Heatmap,
    Lines,
    On,
    Section,
    Series,
    Table,
    Text,
    columns,
    section,
)
from minifloat.report.text import short

_COLUMNS = 128  #: columns of a heatmap; each shows the largest of the channels that share it
_ROWS = 32  #: rows of a heatmap
_OUTLIERS = 10  #: channels in the table
_LEAST_DARKEST = 4.0  #: times the median channel; the darkest shade of a heatmap is at least this
#: Shares of the elements below this are not drawn.
_SMALLEST = 1e-9
_LEAST_SHOWN = 1e-4  #: smallest share that a table gives as a number
#: Octaves below the smallest magnitude of E4M3 that are drawn.
_BELOW = 12


def magnitude_section(groups: Mapping[str, Sequence[InputSummary]], stats: ActivationStats) -> Section:
    """Return the section with histograms of the magnitudes, in units of the static scales; empty without histograms."""
    series, rows = [], []
    for name, group in groups.items():
        counts = _scaled_counts(group, stats)
        if counts is None or not counts.sum():
            continue
        series.append(Series(name, _drawn(counts)))
        rows.append([name, *map(_percent, _shares(counts))])
    if not series:
        return section("")
    smallest = E4M3.min_positive
    marks = (
        (smallest, f"smallest {short(smallest)}"),
        (E4M3.min_normal, f"normal from {short(E4M3.min_normal)}"),
        (E4M3.max, f"largest {short(E4M3.max)}"),
    )
    x, y = Axis("magnitude / scale", log=True), Axis("share of the elements", log=True, percent=True)
    names = ("above the largest", "normal", "subnormal", "below half the smallest", "zero")
    return section(
        "Magnitudes",
        Table(columns("input of", *names), rows),
        Text(
            f"Shares of the elements of {stats.tokens:,} tokens, by eighths of an octave. An element above the largest "
            "value saturates; one below half the smallest becomes zero."
        ),
        Figure(
            "Magnitudes of the inputs over their static scale, by octave; lines: the range of E4M3",
            Lines(series, x, y, marks=marks),
        ),
        on=On.PAGE,
    )


def _scaled_counts(group: Sequence[InputSummary], stats: ActivationStats) -> npt.NDArray[np.int64] | None:
    """Return the histogram of the magnitudes over the scale, summed over a group; None without histograms."""
    total: npt.NDArray[np.int64] | None = None
    for row in group:
        module = stats.inputs.get(row.module)
        if module is None or module.histogram is None or not row.scale:
            continue
        shift = round(-math.log2(row.scale) * BINS_PER_OCTAVE)
        moved = np.zeros_like(module.histogram)
        moved[0] = module.histogram[0]
        index = np.arange(1, FINITE_BINS)
        np.add.at(moved, np.clip(index + shift, 1, FINITE_BINS - 1), module.histogram[1:FINITE_BINS])
        total = moved if total is None else total + moved
    return total


def _drawn(counts: npt.NDArray[np.int64]) -> list[tuple[float, float]]:
    """Return the middle of each octave in the range that is drawn, and its share of the elements."""
    smallest = E4M3.min_positive * 2.0**-_BELOW
    drawn = ((start, share) for start, share in octaves(counts) if start >= smallest and share > _SMALLEST)
    return [(start * math.sqrt(2), share) for start, share in drawn]


def _shares(counts: npt.NDArray[np.int64]) -> list[float]:
    """Return the shares of elements that saturate, are normal, are subnormal, are flushed, and are zero."""
    edges = bin_edges()[: len(counts)]
    nonzero = np.arange(len(counts)) > 0
    smallest = E4M3.min_positive / 2
    above, normal = edges > E4M3.max, edges >= E4M3.min_normal
    parts = (above, normal & ~above, (edges >= smallest) & ~normal & nonzero, (edges < smallest) & nonzero, ~nonzero)
    return [float(counts[part].sum() / counts.sum()) for part in parts]


def _percent(share: float) -> str:
    return f"{share:.2%}" if not 0 < share < _LEAST_SHOWN else f"< {_LEAST_SHOWN:.2%}"


def channel_section(groups: Mapping[str, Sequence[InputSummary]], stats: ActivationStats) -> Section:
    """Return the section about outlier channels: the largest, and a heatmap for each kind; empty without channels."""
    found = {name: _channels(group, stats) for name, group in groups.items()}
    found = {name: rows for name, rows in found.items() if rows}
    if not found:
        return section("")
    outliers = sorted(
        (
            (ratio, module, channel, amax)
            for rows in found.values()
            for module, values in rows
            for channel, (ratio, amax) in _largest(values)
        ),
        reverse=True,
    )[:_OUTLIERS]
    cells = [[module, str(channel), short(amax), f"{ratio:.1f}x"] for ratio, module, channel, amax in outliers]
    return section(
        "Outlier channels",
        Table(columns("input of", "channel", "amax", "times the median"), cells),
        Text(
            "The largest channel sets a scale per token or per tensor, and the other channels use a smaller part of "
            "the format's range. The median is over the channels of the same input."
        ),
        *(_heatmap(name, rows, _darkest(outliers)) for name, rows in found.items()),
        on=On.PAGE,
    )


def _channels(group: Sequence[InputSummary], stats: ActivationStats) -> list[tuple[str, npt.NDArray[np.float32]]]:
    """Return the amax of each channel by input; linears that share an input are shown once."""
    rows: list[tuple[str, npt.NDArray[np.float32]]] = []
    for row in group:
        module: ModuleStats | None = stats.inputs.get(row.module)
        if module is None or module.channel_amax is None or not module.channel_amax.any():
            continue
        if not rows or not np.array_equal(rows[-1][1], module.channel_amax):
            rows.append((row.module, module.channel_amax))
    return rows


def _largest(values: npt.NDArray[np.float32]) -> list[tuple[int, tuple[float, float]]]:
    """Return the largest channels of an input, each with its ratio to the median channel and its amax."""
    median = _median(values)
    order = np.argsort(values)[::-1][:_OUTLIERS]
    return [(int(channel), (float(values[channel]) / median, float(values[channel]))) for channel in order]


def _median(values: npt.NDArray[np.float32]) -> float:
    return float(np.median(values[values > 0]))


def _heatmap(name: str, rows: Sequence[tuple[str, npt.NDArray[np.float32]]], darkest: float) -> Figure:
    shown = rows[:: math.ceil(len(rows) / _ROWS)]
    some = "" if len(shown) == len(rows) else f"; {len(shown)} of {len(rows)} inputs"
    channels = len(shown[0][1])
    per_column = math.ceil(channels / _COLUMNS)
    largest = "" if per_column == 1 else f", the largest of {per_column} in a column"
    cells = [(module, _columns(values, per_column)) for module, values in shown]
    return Figure(
        f"{name}: amax of each channel over the median channel of the same input{some}",
        Heatmap(cells, 1.0, darkest, "times the median", f"input channel 0 to {channels - 1:,}{largest}"),
    )


def _darkest(outliers: Sequence[tuple[float, str, int, float]]) -> float:
    """Return the power of two that the largest ratio does not exceed, for one scale in all heatmaps."""
    return max(2.0 ** math.ceil(math.log2(outliers[0][0])), _LEAST_DARKEST)


def _columns(values: npt.NDArray[np.float32], per_column: int) -> list[float]:
    padded = np.zeros(math.ceil(len(values) / per_column) * per_column, np.float32)
    padded[: len(values)] = values / _median(values)
    return [float(value) for value in padded.reshape(-1, per_column).max(1)]
