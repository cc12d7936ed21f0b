"""Ranges of the numbers that options accept: stated once, checked by the dataclass and shown by the command line."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args

from minifloat.errors import UsageError


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, or above `above`; `is_size` marks a number of bytes."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    is_size: bool = False

    def __contains__(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
        )

    def __str__(self) -> str:
        lower = f"more than {self.above}" if self.above is not None else f"at least {self.least}"
        return lower if self.most is None else f"{lower} and at most {self.most}"


Natural = Annotated[int, Range(0)]
Count = Annotated[int, Range(1)]
AtLeastTwo = Annotated[int, Range(2)]
Bytes = Annotated[int, Range(1, is_size=True)]
Port = Annotated[int, Range(0, 65535)]
NonNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(above=0)]
Fraction = Annotated[float, Range(0, 1)]


def annotation_of(cls: type, name: str) -> Any:
    """Return the evaluated annotation of a dataclass's field."""
    owner = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
    stated = inspect.get_annotations(owner)[name]
    return eval(stated, vars(sys.modules[owner.__module__])) if isinstance(stated, str) else stated


def ranges_in(annotation: Any) -> Iterator[Range]:
    """Yield the ranges in an annotation such as ``Count | None``."""
    if isinstance(annotation, Range):
        yield annotation
    for part in (*get_args(annotation), *getattr(annotation, "__metadata__", ())):
        yield from ranges_in(part)


def require_in_range(options: Any) -> None:
    """Refuse a field of a dataclass whose value is outside the range of its annotation."""
    for field in fields(options):
        value = getattr(options, field.name)
        if value is None or not isinstance(value, (int, float)):
            continue
        for allowed in ranges_in(annotation_of(type(options), field.name)):
            if value not in allowed:
                raise UsageError(f"{field.name}: expected {allowed}, got {value}")
