"""Schemas of the JSON files that come with a checkpoint: which values a field may have.

A schema names the fields that are read and lets all others, missing ones and null pass; only what this package alone
writes has exact fields. pydantic is not used: it takes longer to import than `inspect` to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minifloat.errors import CheckpointError

#: Checks a value of a field; raises `Unfit`. Arguments: the value, and its place for the message.
Check = Callable[[Any, str], None]

_LARGEST = 2**31 - 1  #: of any size, so that it fits the integers of C


class Unfit(ValueError):
    """A value is not what its field allows; the message says where, what was expected, and what was found."""

    def __init__(self, where: str, expected: str, found: object) -> None:
        text = repr(found)
        super().__init__(f"{where}: expected {expected}, found {text if len(text) <= 60 else f'{text[:57]}...'}")


def check_fields(
    values: Mapping[str, Any], schema: Mapping[str, Check], path: Path, error: type[CheckpointError], where: str = ""
) -> None:
    try:
        fields(schema)(values, where)
    except Unfit as unfit:
        raise error(path, str(unfit)) from None


def fields(schema: Mapping[str, Check]) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            raise Unfit(where, "an object", value)
        for name, check_field in schema.items():
            if value.get(name) is not None:
                check_field(value[name], f"{where}.{name}" if where else name)

    return check


def exact_fields(schema: Mapping[str, Check]) -> Check:
    """Return the check of an object that has each of these fields, of which none is skipped, and no other."""

    def check(value: Any, where: str) -> None:
        any_object(value, where)
        if value.keys() != schema.keys():
            raise Unfit(where, f"the fields {', '.join(schema)}", list(value))
        for name, check_field in schema.items():
            check_field(value[name], f"{where}.{name}" if where else name)

    return check


def or_null(check_value: Check) -> Check:
    def check(value: Any, where: str) -> None:
        if value is not None:
            check_value(value, where)

    return check


def integer(low: int, high: int = _LARGEST, expected: str = "") -> Check:
    """Return the check of an integer from `low` to `high`; true and false are none."""

    def check(value: Any, where: str) -> None:
        if type(value) is not int or not low <= value <= high:
            raise Unfit(where, expected or f"an integer from {low} to {high}", value)

    return check


#: Checks a number of bytes or elements.
natural = integer(0, 2**63)


def number(low: float, high: float = math.inf, *, above: bool = False) -> Check:
    rule = "a finite number" + (f" {'above' if above else 'of at least'} {low:g}" if low > -math.inf else "")
    rule += f" and at most {high:g}" if high < math.inf else ""

    def check(value: Any, where: str) -> None:
        if type(value) not in (int, float) or not math.isfinite(_as_float(value)):
            raise Unfit(where, rule, value)
        if value < low or value > high or (above and value == low):
            raise Unfit(where, rule, value)

    return check


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def flag(value: Any, where: str) -> None:
    if type(value) is not bool:
        raise Unfit(where, "true or false", value)


def text(value: Any, where: str) -> None:
    """Check a string of characters; half of a surrogate pair, which JSON can spell, is none."""
    if not isinstance(value, str):
        raise Unfit(where, "a string", value)
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise Unfit(where, "a string of characters", value)


def any_object(value: Any, where: str) -> None:
    fields({})(value, where)


def list_of(check_item: Check, length: int | None = None, *, nullable: bool = False, of: str = "") -> Check:
    expected = " ".join(("a list", *(["of"] if length or of else []), *([str(length)] if length else []), of)).strip()

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise Unfit(where, expected, value)
        for index, item in enumerate(value):
            if item is not None or not nullable:
                check_item(item, f"{where}[{index}]")

    return check


def map_of(check_value: Check) -> Check:
    """Return the check of an object whose values all pass a check."""

    def check(value: Any, where: str) -> None:
        any_object(value, where)
        for name, item in value.items():
            check_value(item, f"{where}.{name}")

    return check


def either(expected: str, *checks: Check) -> Check:
    """Return the check of a value that passes one of several checks."""

    def check(value: Any, where: str) -> None:
        for alternative in checks:
            try:
                alternative(value, where)
            except Unfit:
                continue
            return
        raise Unfit(where, expected, value)

    return check
