"""The page of `inspect --plot`: bytes by kind and by format, magnitudes of the weights, and their scales."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder
from minifloat.model.layouts import describe
from minifloat.model.layouts.inspection import Inspection, inspect_opened
from minifloat.model.layouts.magnitudes import Magnitudes, sample_magnitudes
from minifloat.numerics.histogram import bin_edges, octaves
from minifloat.report.axes import Axis, format_number
from minifloat.report.charts import Bar, Series, bar_chart, line_chart
from minifloat.report.page import facts, figure, page, paragraph, section, table
from minifloat.report.text import size_text, visible

_LEAST_DRAWN = 1e-5  #: share of an octave at the ends of a histogram below which it is not drawn


def inspection_page(path: str | os.PathLike[str], *, revision: str | None = None) -> str:
    """Return a self-contained HTML page about a checkpoint; a sample of each weight is read."""
    with Checkpoint.open(model_folder(path, revision=revision)) as checkpoint:
        description = describe(checkpoint)
        inspection = inspect_opened(path, checkpoint, description)
        magnitudes = sample_magnitudes(checkpoint, description)
    return draw_inspection(inspection, magnitudes)


def draw_inspection(inspection: Inspection, magnitudes: Mapping[str, Magnitudes]) -> str:
    """Return the page of an inspection and of the magnitudes of a sample of its weights."""
    bits = inspection.quantized_bits_per_weight
    pairs = [
        ("architecture", inspection.architecture),
        ("layout", inspection.layout or "not quantized"),
        ("bytes", f"{inspection.nbytes:,} ({size_text(inspection.nbytes)}) in {inspection.shards} file(s)"),
        ("bits per weight", f"{inspection.bits_per_weight:.2f}"),
        *([] if math.isnan(bits) else [("of quantized weights", f"{bits:.2f}")]),
        *([("KV cache", inspection.kv_cache)] if inspection.kv_cache else []),
    ]
    return page(
        f"What the checkpoint holds: {visible(Path(inspection.path).name)}",
        section("Checkpoint", facts([(name, visible(value)) for name, value in pairs])),
        _bytes_section(inspection, "kind"),
        _bytes_section(inspection, "format"),
        _magnitude_section(magnitudes),
        _scale_section(magnitudes),
    )


def _bytes_section(inspection: Inspection, attribute: str) -> str:
    groups = inspection.by(attribute)
    total = max(inspection.nbytes, 1)
    rows = [
        [visible(name), f"{count:,}", f"{elements:,}", size_text(nbytes), f"{nbytes / total:.1%}"]
        for name, (count, elements, nbytes) in groups.items()
    ]
    bars = [Bar(visible(name), nbytes / total, f"{nbytes / total:.1%}") for name, (_, _, nbytes) in groups.items()]
    caption = f"Share of the bytes by {attribute}"
    axis = Axis("share of the bytes", percent=True)
    return section(
        f"Bytes by {attribute}",
        table((attribute, "tensors", "weights", "bytes", "share"), rows),
        figure(caption, lambda width: bar_chart(bars, title=caption, axis=axis, width=width)),
    )


def _magnitude_section(magnitudes: Mapping[str, Magnitudes]) -> str:
    rows = [
        [
            visible(name),
            f"{entry.weights:,}",
            f"{entry.elements:,}",
            _reach(entry.histogram),
            _share(entry.zeros, entry.elements),
            _share(entry.largest, entry.elements) if entry.scales.any() else "",
        ]
        for name, entry in magnitudes.items()
        if entry.elements
    ]
    if not rows:
        return ""
    columns = ("format", "weights", "sampled elements", "middle 98% of magnitudes", "zero", "largest code")
    note = "A sample of the first rows of every weight, decoded. Zeros are not drawn."
    series = [Series(visible(name), _drawn(entry.histogram)) for name, entry in magnitudes.items()]
    chart = _histogram("Magnitudes of the weights, by octave", series, "magnitude", "share of the elements")
    return section("Magnitudes of the weights", table(columns, rows), paragraph(note), chart)


def _scale_section(magnitudes: Mapping[str, Magnitudes]) -> str:
    scaled = {name: entry for name, entry in magnitudes.items() if entry.scales.any()}
    if not scaled:
        return ""
    rows = [[visible(name), f"{int(entry.scales.sum()):,}", *_ends(entry.scales)] for name, entry in scaled.items()]
    series = [Series(visible(name), _drawn(entry.scales)) for name, entry in scaled.items()]
    chart = _histogram("Scales of the blocks, by octave", series, "scale", "share of the scales")
    note = "Scales as they are stored; a global scale (NVFP4) is not part of them. Magnitudes are rounded down to bins."
    columns = ("format", "sampled scales", "smallest", "median", "largest")
    return section("Scales", table(columns, rows), paragraph(note), chart)


def _histogram(caption: str, series: list[Series], label: str, share: str) -> str:
    x, y = Axis(label, log=True), Axis(share, percent=True, low=0.0)
    return figure(caption, lambda width: line_chart(series, title=caption, x=x, y=y, width=width))


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
    """Return the start of the bin at a fraction of the counts."""
    total = counts.cumsum()
    return float(bin_edges()[int(np.searchsorted(total, max(fraction * total[-1], 1)))])


def _share(count: int, of: int) -> str:
    return f"{count / max(of, 1):.2%}"
