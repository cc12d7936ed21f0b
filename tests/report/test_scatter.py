"""The scatter chart: its front, its names, and what it does not draw."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from minifloat.report.axes import Axis
from minifloat.report.scatter import ScatterPoint, pareto_front, scatter_chart

SVG = "{http://www.w3.org/2000/svg}"


def draw(points: list[ScatterPoint], width: int = 760, **options: object) -> ElementTree.Element:
    chart = scatter_chart(points, title="t", x=Axis("MiB"), y=Axis("nats", log=True), width=width, **options)  # type: ignore[arg-type]
    return ElementTree.fromstring(chart)


def texts(chart: ElementTree.Element) -> list[str]:
    return [next(iter(element.itertext())) for element in chart.iter(f"{SVG}text")]


def test_the_front_holds_the_points_that_no_other_beats() -> None:
    points = [ScatterPoint(name, x, y) for name, x, y in (("a", 1, 9), ("b", 2, 3), ("c", 3, 5), ("d", 4, 1))]
    assert [point.name for point in pareto_front(points)] == ["a", "b", "d"]
    same_size = [ScatterPoint("worse", 1, 2), ScatterPoint("better", 1, 1)]
    assert [point.name for point in pareto_front(same_size)] == ["better"]


@pytest.mark.parametrize("width", [350, 760])
def test_names_do_not_cover_each_other_and_stay_inside(width: int) -> None:
    points = [ScatterPoint(f"model-{index}", 3 + index / 50, 0.1 * 1.02**index, 0.05, 0.2) for index in range(9)]
    chart = draw(points, width)
    placed = []
    for element in chart.iter(f"{SVG}text"):
        name = next(iter(element.itertext()))
        if name.startswith("model-"):
            x, y = float(element.get("x", "0")), float(element.get("y", "0"))
            placed.append((x, y, x + 6.4 * len(name)))
    assert placed
    assert all(left >= 0 and right <= width for left, _, right in placed)
    for index, (left, y, right) in enumerate(placed):
        for other_left, other_y, other_right in placed[index + 1 :]:
            assert abs(y - other_y) >= 12 or right <= other_left or other_right <= left


def test_points_that_cannot_be_drawn_are_left_out() -> None:
    points = [ScatterPoint("zero", 1, 0.0), ScatterPoint("nan", math.nan, 1.0), ScatterPoint("shown", 2, 0.5)]
    assert [text for text in texts(draw(points)) if text in {"zero", "nan", "shown"}] == ["shown"]
    assert "nothing to show" in texts(draw(points[:2]))


def test_the_bound_is_a_line_with_its_text_and_inside_the_axis() -> None:
    chart = draw([ScatterPoint("a", 1, 0.5), ScatterPoint("b", 2, 0.4)], mark=(0.02, "bound 0.02"))
    assert "bound 0.02" in texts(chart)
    assert "0.02" in texts(chart) or "0.05" in texts(chart)
