"""The magnitudes and the channels on the page of activation statistics, against counts of the elements themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pages import captions, loads_nothing, rows, sections, text_of

from minifloat.calibration.document import document
from minifloat.calibration.rules import Max
from minifloat.calibration.stats import ActivationStats, ModelIdentity, ModuleStats
from minifloat.numerics.formats import E4M3
from minifloat.numerics.histogram import count_magnitudes
from minifloat.report import html
from minifloat.report.document import Figure, Heatmap, Section

MODEL = ModelIdentity("LlamaForCausalLM", "c" * 64, "t" * 64, "w" * 64)
NAME = "model.layers.0.mlp.down_proj"


def stats_of(values: np.ndarray, channels: np.ndarray | None = None, *, histogram: bool = True) -> ActivationStats:
    """Return statistics of one input, one row of `values` per sequence."""
    counts = count_magnitudes(values.astype(np.float32)) if histogram else None
    module = ModuleStats(
        np.abs(values).max(1).astype(np.float32), np.full(len(values), values.shape[1]), counts, channels
    )
    return ActivationStats(MODEL, len(values), values.size, {}, {NAME: module})


def stats_page(stats: ActivationStats, rule: Max, held_out: ActivationStats | None = None) -> str:
    return html.write(document(stats, rule, held_out))


def heatmap(stats: ActivationStats) -> Heatmap:
    """Return the data of the first chart of channels."""
    (channels,) = (
        block
        for block in document(stats, Max()).blocks
        if isinstance(block, Section) and block.title == "Outlier channels"
    )
    return next(
        block.chart for block in channels.blocks if isinstance(block, Figure) and isinstance(block.chart, Heatmap)
    )


def percent(text: str) -> float:
    return 0.0 if text.startswith("<") else float(text.removesuffix("%")) / 100


@pytest.mark.parametrize("size", [1.0, 3e-3, 700.0])
def test_shares_are_those_of_the_elements_over_the_scale(size: float) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(40, 2000)) ** 5 * size  # a heavy tail: most elements are far below the largest
    values[:, :100] = 0
    section = sections(stats_page(stats_of(values), Max()))["Magnitudes"]
    ((name, *cells),) = rows(section)
    assert name == "mlp.down_proj"
    scaled = np.abs(values) / (np.abs(values).max() / E4M3.max)
    half = E4M3.min_positive / 2
    expected = [
        (scaled > E4M3.max * 1.0001).mean(),
        ((scaled >= E4M3.min_normal) & (scaled <= E4M3.max)).mean(),
        ((scaled >= half) & (scaled < E4M3.min_normal)).mean(),
        ((scaled < half) & (scaled > 0)).mean(),
        (scaled == 0).mean(),
    ]
    assert [percent(cell) for cell in cells] == pytest.approx(expected, abs=0.012)  # half a bin at each border
    assert sum(map(percent, cells)) == pytest.approx(1, abs=5e-4)


def test_a_scale_that_is_too_small_shows_what_saturates() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(40, 500))
    small = stats_of(values / 8, histogram=False)
    ((_, above, *_),) = rows(sections(stats_page(small, Max(), stats_of(values)))["Magnitudes"])
    largest = np.abs(values / 8).max()
    assert percent(above) == pytest.approx((np.abs(values) > largest).mean(), abs=0.03)
    assert percent(above) > 0.3


def test_the_range_of_e4m3_is_drawn_in() -> None:
    page = stats_page(stats_of(np.random.default_rng(0).normal(size=(4, 500))), Max())
    text = text_of(sections(page)["Magnitudes"])
    for word in ("largest 448", "normal from 0.01562", "smallest 0.001953"):
        assert word in text


def test_without_histograms_or_channels_there_are_no_such_sections() -> None:
    page = stats_page(stats_of(np.ones((4, 8)), histogram=False), Max())
    assert not {"Magnitudes", "Outlier channels"} & set(sections(page))


def test_outlier_channels_are_listed_with_their_ratio_to_the_median() -> None:
    channels = np.ones(300, np.float32)
    channels[[7, 290]] = (50.0, 20.0)
    channels[:3] = 0  # channels that are never used do not lower the median
    section = sections(stats_page(stats_of(np.ones((4, 8)), channels), Max()))["Outlier channels"]
    assert rows(section)[:2] == [[NAME, "7", "50", "50.0x"], [NAME, "290", "20", "20.0x"]]
    (caption,) = captions(section)
    assert caption == "mlp.down_proj: amax of each channel over the median channel of the same input"
    assert "1 to 64 times the median" in text_of(section)
    assert "the largest of 3 in a column" in text_of(section)


def test_the_darkest_cells_are_those_of_the_outliers() -> None:
    channels = np.ones(64, np.float32)
    channels[10] = 64.0
    chart = heatmap(stats_of(np.ones((4, 8)), channels))
    assert (chart.low, chart.high) == (1.0, 64.0)
    ((_, values),) = chart.rows
    assert list(values) == [1.0] * 10 + [64.0] + [1.0] * 53


def test_inputs_that_several_linears_share_are_one_row() -> None:
    stats = stats_of(np.ones((4, 8)), np.arange(1, 9, dtype=np.float32))
    module = stats.inputs[NAME]
    shared = {f"model.layers.0.mlp.{name}_proj": module for name in ("gate", "up")}
    chart = heatmap(replace(stats, inputs=shared))
    assert [name for name, _ in chart.rows] == ["model.layers.0.mlp.gate_proj"]
    assert loads_nothing(stats_page(replace(stats, inputs=shared), Max()))
