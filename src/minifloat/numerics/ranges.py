"""Values that options accept, stated once in annotations: the dataclass checks them, the command line shows them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin

from minifloat.errors import UnknownNameError, UsageError


@dataclass(frozen=True)
class Range:
    """Numbers of at least `least` or above `above`, and at most `most` or below `below`; `is_size`: of bytes."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    is_size: bool = False

    def __contains__(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        ends = {"at least": self.least, "more than": self.above, "at most": self.most, "less than": self.below}
        return " and ".join(f"{words} {end}" for words, end in ends.items() if end is not None)


Natural = Annotated[int, Range(0)]
Count = Annotated[int, Range(1)]
AtLeastTwo = Annotated[int, Range(2)]
Bytes = Annotated[int, Range(1, is_size=True)]
Port = Annotated[int, Range(0, 65535)]
NonNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(above=0)]
Fraction = Annotated[float, Range(0, 1)]
FractionBelowOne = Annotated[float, Range(0, below=1)]


def annotation_of(cls: type, name: str) -> Any:
    """Return the evaluated annotation of a dataclass's field; Any if it has names for type checkers only."""
    owner = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
    stated = inspect.get_annotations(owner)[name]
    try:
        return eval(stated, vars(sys.modules[owner.__module__])) if isinstance(stated, str) else stated
    except NameError:
        return Any


def ranges_in(annotation: Any) -> Iterator[Range]:
    """Yield the ranges in an annotation such as ``Count | None``."""
    if isinstance(annotation, Range):
        yield annotation
    for part in (*get_args(annotation), *getattr(annotation, "__metadata__", ())):
        yield from ranges_in(part)


def choices_in(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from choices_in(part)


def check_fields(options: Any) -> None:
    """Refuse a field of a dataclass whose value is outside the range, or not among the names, of its annotation."""
    for field in fields(options):
        value, annotation = getattr(options, field.name), annotation_of(type(options), field.name)
        choices = tuple(choices_in(annotation))
        if choices and value is not None and value not in choices:
            raise UnknownNameError(field.name, value, choices)
        for allowed in ranges_in(annotation) if isinstance(value, (int, float)) else ():
            if value not in allowed:
                raise UsageError(f"{field.name}: expected {allowed}, got {value}")
