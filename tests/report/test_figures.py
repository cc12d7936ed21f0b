"""Charts as SVG: their content, equal bytes for equal data, and text without effect."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minifloat.report.document import (
    Axis,
    Bar,
    Bars,
    Dot,
    Dots,
    Figure,
    Heatmap,
    Lines,
    Point,
    Scatter,
    Series,
)
from minifloat.report.figures import draw, pareto_front

SVG = "{http://www.w3.org/2000/svg}"
CHARTS = {
    "lines": Lines(
        [Series("first", [(1, 0.5), (10, 0.25)], [(1, 0.4, 0.6), (10, 0.2, 0.3)]), Series("second", [(1, 1.0)])],
        Axis("tokens", log=True),
        Axis("share", percent=True, low=0.0, high=1.0),
        marks=[(5.0, "bound 5"), (8.0, "bound 8")],
    ),
    "bars": Bars([Bar("down_proj", 3.0, "3; 24 dB"), Bar("up_proj", 1.0, "1; 30 dB")], Axis("nats"), (2.0, "bound 2")),
    "dots": Dots(
        [("prose", [Dot(0.1, "+10%", 0.05, 0.15), Dot(0.2, "+20%")])],
        ["one", "two"],
        Axis("change", percent=True),
        (0.15, "bound 15%"),
    ),
    "scatter": Scatter(
        [Point("small", 1.0, 0.1, 0.05, 0.2), Point("large", 2.0, 0.01)],
        Axis("MiB"),
        Axis("KL", log=True),
        (0.02, "bound 0.02"),
    ),
    "heatmap": Heatmap([("q_proj", [1.0, 2.0, 16.0]), ("o_proj", [1.0, 1.0, 1.0])], 1.0, 16.0, "times", "channel"),
}
TEXTS = {
    "lines": {"first", "second", "tokens", "share", "bound 5", "bound 8", "100%", "10"},
    "bars": {"down_proj", "3; 24 dB", "1; 30 dB", "nats", "bound 2"},
    "dots": {"prose", "+10%", "+20%", "one", "two", "change", "bound 15%"},
    "scatter": {"small", "large", "MiB", "KL", "bound 0.02"},
    "heatmap": {"q_proj", "o_proj", "channel; 8 shades from 1 to 16 times, darker is larger"},
}


def texts(svg: str) -> set[str]:
    return {"".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{SVG}text")}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_shows_its_names_numbers_axes_and_bounds(name: str) -> None:
    assert TEXTS[name] <= texts(draw(Figure("caption", CHARTS[name])))


@pytest.mark.parametrize("name", CHARTS)
def test_equal_data_gives_equal_bytes_and_a_title(name: str) -> None:
    first, second = (draw(Figure("a <caption>", CHARTS[name])) for _ in range(2))
    assert first == second
    root = ElementTree.fromstring(first)
    assert (root.get("role"), root.get("aria-label")) == ("img", "a <caption>")


def test_charts_of_one_page_share_no_id_and_load_nothing() -> None:
    found = [draw(Figure(name, chart)) for name, chart in CHARTS.items()]
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in found]
    assert sum(map(len, ids)) == len(set().union(*ids))
    assert not any(re.search(r"""(?:href="|url\()(?!#)|<script|<image|<metadata""", svg) for svg in found)


def test_colours_are_those_of_the_page() -> None:
    svg = draw(Figure("caption", CHARTS["lines"]))
    assert "var(--series-1,#1f6fb4)" in svg
    assert "currentColor" in svg
    assert not set(re.findall(r"#[0-9a-f]{6}", svg)) - {"#1f6fb4", "#b8520a"}


def test_a_chart_alone_has_its_own_background() -> None:
    assert "<style>svg{color:#1c2128;background:#fff" in draw(Figure("caption", CHARTS["bars"]), alone=True)


@given(st.text(st.characters(), max_size=40))
@settings(max_examples=20, deadline=None)
def test_any_name_is_plain_text(name: str) -> None:
    svg = draw(Figure(name, Lines([Series(name, [(1.0, 1.0), (2.0, 2.0)])], Axis(name), Axis(name))))
    ElementTree.fromstring(svg)
    svg.encode()


def test_mathematics_in_a_name_is_not_typeset() -> None:
    assert r"$\alpha$ <b>" in texts(draw(Figure("caption", Bars([Bar(r"$\alpha$ <b>", 1.0, "$x$")], Axis("nats")))))


@pytest.mark.parametrize(
    "points", [[], [(1.0, math.nan)], [(0.0, 1.0)], [(1.0, 1.0)], [(1.0, 1.0), (2.0, math.inf), (3.0, 1.0)]]
)
def test_what_a_log_axis_cannot_hold_is_left_out(points: list[tuple[float, float]]) -> None:
    svg = draw(Figure("caption", Lines([Series("a", points)], Axis("x", log=True), Axis("y", log=True))))
    ElementTree.fromstring(svg)
    assert not re.search(r"\b(nan|inf)\b", svg)


@given(
    st.lists(st.tuples(st.integers(0, 99), st.floats(0, 2.0**127, width=32, allow_subnormal=False)), max_size=20),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_any_float32_values_can_be_drawn(points: list[tuple[float, float]], log: bool) -> None:
    ElementTree.fromstring(draw(Figure("caption", Lines([Series("a", points)], Axis("x"), Axis("amax", log=log)))))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_bars_dots_and_points_of_any_value_can_be_drawn(value: float) -> None:
    for chart in (
        Bars([Bar("a", value, "text")], Axis("nats")),
        Dots([("a", [Dot(value, "text", value, value)])], ["a"], Axis("nats")),
        Scatter([Point("a", value, value, value, value)], Axis("MiB"), Axis("KL", log=True)),
    ):
        assert not re.search(r"\b(nan|inf)\b", draw(Figure("caption", chart)))


def test_a_long_name_loses_its_middle() -> None:
    name = f"model.layers.0.{'x' * 60}.down_proj"
    (shown,) = (text for text in texts(draw(Figure("c", Bars([Bar(name, 1.0, "1")], Axis("n"))))) if "…" in text)
    assert shown.startswith("model.layers.0.")
    assert shown.endswith("down_proj")


def test_the_front_has_the_points_that_no_other_beats_on_both_axes() -> None:
    points = [Point("a", 1, 5), Point("b", 2, 3), Point("c", 3, 4), Point("d", 4, 1), Point("e", 2, 9)]
    assert [point.name for point in pareto_front(points)] == ["a", "b", "d"]
