"""Dataclasses as JSON values and back."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from comparisons import full_candidate, hostile_comparison, make_candidate, make_comparison
from gains import make_gains

from minifloat.evaluate.bench.figures import GainsReport
from minifloat.evaluate.compare.result import Comparison
from minifloat.report.json_values import from_values, to_values


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    value: float
    name: str | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner
    pairs: tuple[tuple[float, int], ...] = ()
    by_size: dict[int, Inner] = field(default_factory=dict)
    colour: Colour = Colour.RED
    anything: dict[str, Any] = field(default_factory=dict)
    flag: bool = False


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(to_values(value), allow_nan=False))


@pytest.mark.parametrize(
    "comparison",
    [make_comparison(full_candidate(), make_candidate("b", 10)), hostile_comparison()],
    ids=["full", "hostile"],
)
def test_a_comparison_comes_back_from_json(comparison: Comparison) -> None:
    again = from_values(Comparison, through_json(comparison))
    assert to_values(again) == to_values(comparison)  # NaN is not equal to itself, but its text is
    assert again.outcome is comparison.outcome
    assert again.candidates[0].texts == comparison.candidates[0].texts


def test_a_bench_comes_back_from_json_with_its_gains() -> None:
    report = make_gains()
    again = from_values(GainsReport, through_json(report))
    assert again == report
    assert again.gains == report.gains


def test_numbers_that_json_lacks_and_keys_that_are_numbers_come_back() -> None:
    value = Outer(Inner(math.inf), ((-math.inf, 1), (2.0, 3)), {16: Inner(1.5, "x")}, anything={"a": [1, None]})
    assert from_values(Outer, through_json(value)) == value
    assert math.isnan(from_values(Inner, through_json(Inner(math.nan))).value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "the field inner is missing"),
        ({"inner": {"value": 1}, "more": 2}, "unknown field more"),
        ({"inner": {"value": "1"}}, r"Outer.inner.value: expected a number, found '1'"),
        ({"inner": {"value": True}}, "expected a number, found True"),
        ({"inner": {"value": 1, "name": 2}}, "expected str, found int"),
        ({"inner": {"value": 1}, "pairs": [[1]]}, "expected 2 entries, found 1"),
        ({"inner": {"value": 1}, "by_size": {"x": {"value": 1}}}, "expected a number, found 'x'"),
        ({"inner": {"value": 1}, "colour": "blue"}, "'blue' is not a valid Colour"),
        ({"inner": {"value": 1}, "flag": 1}, "expected bool, found 1"),
        ([], "expected dict, found list"),
    ],
)
def test_values_of_another_type_are_refused_by_the_name_of_the_field(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_values(Outer, values)
