"""The picture of schemes, which stands alone."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

from minifloat.report.picture import PictureRow, scheme_picture

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [PictureRow("fp8", 0.0027, 0.0024, 0.003, 1.9), PictureRow("mxfp4 & <x>", 0.1, math.nan, math.nan, None)]


def test_each_scheme_has_its_numbers_and_a_bar_as_long_as_its_speed() -> None:
    root = ElementTree.fromstring(scheme_picture(ROWS, notes=["measured somewhere"]))
    texts = ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]
    assert {"fp8", "0.0027", "1.90x", "mxfp4 & <x>", "0.10", "not measured", "measured somewhere"} <= set(texts)
    (bar,) = root.iter(f"{SVG}rect")
    line = next(element for element in root.iter(f"{SVG}line") if element.get("stroke-dasharray"))
    one = float(line.get("x1", "0")) - float(bar.get("x", "0"))
    assert abs(float(bar.get("width", "0")) / one - 1.9) < 0.01


def test_the_picture_has_its_own_colours_for_light_and_dark_and_a_description() -> None:
    picture = scheme_picture(ROWS, notes=[])
    root = ElementTree.fromstring(picture)
    style = "".join(next(root.iter(f"{SVG}style")).itertext())
    assert style.count("--series-1:") == 2
    assert "prefers-color-scheme:dark" in style
    assert "fp8 KL 0.0027, 1.90 times as fast as BF16" in root.get("aria-label", "")
    assert "url(" not in picture
