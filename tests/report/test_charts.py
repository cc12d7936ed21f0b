from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minifloat.report.axes import Axis, format_number, log_ticks, nice_ticks
from minifloat.report.charts import Bar, Dot, Series, bar_chart, dot_chart, line_chart, meter
from minifloat.report.svg import escape

SVG = "{http://www.w3.org/2000/svg}"
NAN, INF = math.nan, math.inf
X, Y, LOG = Axis("layer", whole=True), Axis("amax"), Axis("amax", log=True)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def parse(svg: str) -> ElementTree.Element:
    assert not re.search(r"\b(nan|inf)\b", svg, re.IGNORECASE)
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


def chart(*series: Series, y: Axis = Y, **options: object) -> ElementTree.Element:
    return parse(line_chart(series, title="a chart", x=X, y=y, **options))  # type: ignore[arg-type]


def lines(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """Return the corners of every line in pixels, without the samples of the legend, whose paths are relative."""
    paths = [path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("fill") == "none"]
    found = [[float(number) for number in NUMBER.findall(path)] for path in paths if "h" not in path]
    return [list(zip(numbers[::2], numbers[1::2], strict=True)) for numbers in found]


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


# Ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-0.3, 0.3, [-0.2, 0, 0.2]),
        (3, 97, [20, 40, 60, 80]),
        (0, 4e-7, [0, 1e-7, 2e-7, 3e-7, 4e-7]),
        (5, 5, [5]),
    ],
)
def test_linear_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert nice_ticks(low, high) == expected


def test_ticks_of_a_whole_axis_are_integers() -> None:
    assert nice_ticks(0, 2, whole=True) == [0, 1, 2]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1, 1000, [1, 10, 100, 1000]),
        (1e-12, 1e12, [1e-10, 1e-5, 1, 1e5, 1e10]),
        (5, 30, [5, 7, 10, 15, 20, 30]),
        (3.5, 150, [5, 10, 20, 50, 100]),
        (101, 104, [101, 102, 103, 104]),
    ],
)
def test_logarithmic_ticks_have_the_density_that_fits(low: float, high: float, expected: list[float]) -> None:
    assert log_ticks(low, high) == expected


@given(st.floats(1e-30, 1e30), st.floats(1.001, 1e20), st.integers(2, 12))
def test_any_range_has_a_few_ticks_and_none_outside(low: float, ratio: float, count: int) -> None:
    high = low * ratio
    for ticks in (nice_ticks(low, high, count), log_ticks(low, high, count)):
        assert 2 <= len(ticks) <= count + 3
        assert ticks == sorted(set(ticks))
        assert all(low * (1 - 1e-9) <= tick <= high * (1 + 1e-9) for tick in ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (1200, "1,200"),
        (3e-7, "3e-7"),
        (1e6, "1e6"),
        (-2.5e9, "-2.5e9"),
        (NAN, "-"),
        (INF, "-"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


# Lines


def test_a_larger_value_is_drawn_higher_and_a_later_one_further_right() -> None:
    (line,) = lines(chart(Series("a", [(0, 1), (1, 3), (2, 2)])))
    assert line[0][0] < line[1][0] < line[2][0]
    assert line[1][1] < line[2][1] < line[0][1]


def test_on_a_log_axis_equal_ratios_are_equal_distances() -> None:
    (line,) = lines(chart(Series("a", [(0, 1), (1, 10), (2, 100)]), y=LOG))
    assert line[0][1] - line[1][1] == pytest.approx(line[1][1] - line[2][1], abs=0.2)
    assert line[0][1] > line[1][1]


@pytest.mark.parametrize("y", [Y, LOG])
@pytest.mark.parametrize("hole", [NAN, INF])
def test_a_value_that_is_not_finite_is_a_gap(y: Axis, hole: float) -> None:
    root = chart(Series("a", [(0, 1), (1, 2), (2, hole), (3, 3), (4, 4)]), y=y)
    path, *_ = (path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("fill") == "none")
    assert path.count("M") == 2
    assert path.count("L") == 2


def test_zero_is_a_gap_on_a_log_axis_alone() -> None:
    points = [(0.0, 0.0), (1.0, 2.0)]
    assert len(lines(chart(Series("a", points), y=LOG))[0]) == 1
    assert len(lines(chart(Series("a", points)))[0]) == 2


def test_a_point_without_neighbours_is_marked_even_without_markers() -> None:
    def hints(markers: bool) -> list[str | None]:
        root = chart(Series("a", [(0, 1), (1, NAN), (2, 3), (3, 4)]), markers=markers)
        return [title.text for title in root.iter(f"{SVG}title")]

    assert hints(False) == ["a: 1 at 0"]
    assert hints(True) == ["a: 1 at 0", "a: 3 at 2", "a: 4 at 3"]


def test_lines_differ_in_more_than_colour() -> None:
    root = chart(*(Series(f"s{index}", [(0, index), (1, index)]) for index in range(4)))
    strokes = [path for path in root.iter(f"{SVG}path") if path.get("fill") == "none" and "h" not in path.get("d", "")]
    assert len({path.get("stroke-dasharray") for path in strokes}) == 4
    markers = {path.get("d") for path in root.iter(f"{SVG}path") if path.get("fill") is None}
    assert len(markers) == 4


@pytest.mark.parametrize("width", [350, 760])
def test_nothing_leaves_the_chart(width: int) -> None:
    series = [
        Series(f"model.layers.{i}.mlp.experts.127.gate_proj / up_proj", [(0, 1e-9 * i), (31, 3e5)]) for i in range(9)
    ]
    root = chart(*series, y=LOG, width=width)
    height = float(root.get("height", ""))
    for line in lines(root):
        assert all(0 <= x <= width and 0 <= y <= height for x, y in line)
    for text in root.iter(f"{SVG}text"):
        extent = 5.5 * len(text.text or "".join(text.itertext()))
        left = float(text.get("x", "")) - extent * {"end": 1.0, "middle": 0.5}.get(text.get("text-anchor", ""), 0.0)
        assert left >= -1
        assert left + extent <= width + 1
        assert 0 < float(text.get("y", "")) <= height


def test_the_legend_names_every_series_and_a_shortened_name_is_a_tooltip() -> None:
    long = "model." + "x" * 200 + ".down_proj"
    root = chart(Series("short", [(0, 1)]), Series(long, [(0, 2)]), width=350)
    shown = [text for text in texts(root) if "…" in text]
    assert "short" in texts(root)
    assert long in shown[0]
    assert shown[0].endswith("down_proj")


def test_a_band_is_an_area_from_its_low_to_its_high_edge() -> None:
    root = chart(Series("a", [(0, 2), (1, 2)], [(0, 1, 3), (1, 1, 3)]))
    (polygon,) = root.iter(f"{SVG}polygon")
    corners = [tuple(map(float, corner.split(","))) for corner in polygon.get("points", "").split()]
    ((_, line), _) = lines(root)[0]
    assert [y < line for _, y in corners] == [True, True, False, False]


@pytest.mark.parametrize("series", [[], [Series("a", [])], [Series("a", [(0, NAN)])]])
def test_a_chart_without_points_says_that_there_is_nothing_to_show(series: list[Series]) -> None:
    assert "nothing to show" in texts(chart(*series))


@pytest.mark.parametrize("y", [Y, LOG])
@pytest.mark.parametrize("value", [1e-38, 1.0, 3e38])
def test_one_point_can_be_drawn(y: Axis, value: float) -> None:
    assert len(lines(chart(Series("a", [(0, value)]), y=y))[0]) == 1


@given(
    st.lists(st.tuples(st.integers(0, 99), st.floats(0, 2.0**127, width=32, allow_subnormal=False)), max_size=20),
    st.booleans(),
)
def test_any_float32_values_can_be_drawn(points: list[tuple[float, float]], log: bool) -> None:
    chart(Series("a", points), y=Axis("amax", log=log))


# Bars


def bars(values: list[float], **options: object) -> ElementTree.Element:
    entries = [Bar(f"bar {index}", value) for index, value in enumerate(values)]
    return parse(bar_chart(entries, title="bars", axis=Axis("tokens"), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [350, 760])
def test_the_length_of_a_bar_is_proportional_to_its_value(width: int) -> None:
    lengths = [float(rect.get("width", "")) for rect in bars([1, 2, 4, 0], width=width).iter(f"{SVG}rect")]
    assert lengths == pytest.approx([lengths[0], 2 * lengths[0], 4 * lengths[0], 0], abs=0.2)
    assert lengths[0] > 10


def test_bars_of_zeros_have_no_length() -> None:
    assert [float(rect.get("width", "")) for rect in bars([0, 0]).iter(f"{SVG}rect")] == [0, 0]


@pytest.mark.parametrize("value", [NAN, INF, -1.0])
def test_a_value_that_is_not_finite_or_negative_has_no_bar(value: float) -> None:
    lengths = [float(rect.get("width", "")) for rect in bars([value, 2]).iter(f"{SVG}rect")]
    assert lengths[0] == 0
    assert lengths[1] > 10


def test_a_reference_line_beyond_all_bars_is_within_the_chart() -> None:
    root = bars([1, 2], mark=(64, "floor"))
    (mark,) = (line for line in root.iter(f"{SVG}line") if line.get("stroke-dasharray"))
    assert float(mark.get("x1", "")) < float(root.get("width", ""))
    assert "floor" in texts(root)


def test_a_chart_without_bars_says_that_there_is_nothing_to_show() -> None:
    assert "nothing to show" in texts(bars([]))


@pytest.mark.parametrize(("fraction", "filled"), [(0.5, 30), (2, 60), (-1, 0), (NAN, 0), (INF, 0)])
def test_a_meter_is_filled_by_its_fraction(fraction: float, filled: float) -> None:
    _, bar = parse(meter(fraction, width=60)).iter(f"{SVG}rect")
    assert float(bar.get("width", "")) == filled


# Dots


def dots(rows: list[tuple[str, list[Dot]]], names: list[str], **options: object) -> ElementTree.Element:
    return parse(dot_chart(rows, names, title="dots", axis=Axis("change", percent=True), **options))  # type: ignore[arg-type]


def place(marker: ElementTree.Element) -> tuple[float, float]:
    x, y = (float(number) for number in NUMBER.findall(marker.get("transform", "")))
    return x, y


def markers(root: ElementTree.Element) -> list[tuple[float, float]]:
    return [place(path) for path in root.iter(f"{SVG}path") if path.get("transform")]


@pytest.mark.parametrize("width", [350, 760])
def test_a_dot_lies_within_its_interval_and_rows_follow_each_other(width: int) -> None:
    row = [Dot(0.01, "1%", -0.01, 0.02), Dot(0.03, "3%", 0.02, 0.05)]
    root = dots([("first", row), ("second", row[:1])], ["a", "b"], width=width)
    found = markers(root)[:3]
    assert found[0][0] == found[2][0] < found[1][0]
    assert found[0][1] < found[1][1] < found[2][1]
    spans = [path.get("d", "") for path in root.iter(f"{SVG}path") if "H" in path.get("d", "")]
    for (x, _), span in zip(found, spans, strict=True):
        low, high = float(span[1:].split()[0]), float(span.split("H")[1].split("m")[0])
        assert low < x < high
    assert {"first", "second", "1%", "3%", "a", "b"} <= set(texts(root))


def test_a_dot_without_an_interval_has_no_line_and_a_dot_without_a_value_only_its_text() -> None:
    root = dots([("a", [Dot(0.5, "50%")]), ("b", [Dot(INF, "endless")])], ["one"])
    assert len(markers(root)) == 1
    assert not any("H" in path.get("d", "") for path in root.iter(f"{SVG}path"))
    assert "endless" in texts(root)


def test_a_percent_axis_writes_fractions_as_percentages() -> None:
    assert "2%" in texts(dots([("a", [Dot(0.01, ""), Dot(0.03, "")])], ["a", "b"]))


def test_a_chart_without_finite_dots_says_that_there_is_nothing_to_show() -> None:
    assert "nothing to show" in texts(dots([("a", [Dot(NAN, "-")])], ["one"]))


def test_the_reference_line_of_dots_is_at_its_value() -> None:
    root = dots([("a", [Dot(0.02, "2%"), Dot(0.05, "5%")])], ["a", "b"], mark=(0.02, "bound"))
    (mark,) = (line for line in root.iter(f"{SVG}line") if line.get("stroke-dasharray"))
    assert float(mark.get("x1", "")) == markers(root)[0][0]


def test_an_axis_ends_at_its_high_end_even_if_all_values_lie_there() -> None:
    axis = Axis("same top-1", percent=True, high=1.0)
    found = texts(parse(dot_chart([("a", [Dot(1.0, "all")])], ["one"], title="t", axis=axis)))
    assert "100%" in found
    assert not {"120%", "150%"} & set(found)


# Text

NASTY = "<b>&\"'</svg>\x00\ud800"


@pytest.mark.parametrize(
    "draw",
    [
        lambda text: line_chart([Series(text, [(0, 1)])], title=text, x=Axis(text), y=Axis(text)),
        lambda text: bar_chart([Bar(text, 1, text)], title=text, axis=Axis(text), mark=(1, text)),
        lambda text: dot_chart([(text, [Dot(1, text), Dot(2, text)])], [text, text], title=text, axis=Axis(text)),
    ],
)
def test_text_is_escaped(draw: Callable[[str], str]) -> None:
    svg = draw(NASTY)
    root = parse(svg)
    svg.encode()
    assert root.get("aria-label") == "<b>&\"'</svg>\ufffd\ufffd"
    assert not list(root.iter(f"{SVG}b"))


def test_text_that_xml_can_hold_is_kept() -> None:
    assert escape("ä\t中\U0001f600") == "ä\t中\U0001f600"


def test_equal_input_gives_equal_bytes_without_links_to_other_files() -> None:
    series = [Series("a", [(0, 1), (1, 2)])]
    svg = line_chart(series, title="t", x=X, y=Y)
    assert svg == line_chart(series, title="t", x=X, y=Y)
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
