"""Dataclasses as JSON values and back, so that a page can be drawn again from the results of an earlier command.

NaN and infinity become strings. A value of another type than its field is an error: the file may be of another version.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_PLAIN = (bool, int, float, str)


def to_values(value: Any, *, finite: bool = False) -> Any:
    """Return a dataclass, and all that it holds, as JSON values; `finite`: NaN and infinity become None."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_values(getattr(value, field.name), finite=finite) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_values(item, finite=finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_values(item, finite=finite) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None if finite else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def from_values(kind: type[_T], values: Any) -> _T:
    result: _T = _read(kind, values, kind.__name__)
    return result


def _read(kind: Any, value: Any, name: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _read_union(arguments, value, name)
    if origin in (tuple, list, Sequence):
        return _read_sequence(origin, arguments, value, name)
    if origin in (dict, Mapping):
        _require(value, dict, name)
        kind, item_kind = arguments
        if kind is int and (wrong := [key for key in value if not key.isdecimal()]):
            raise ValueError(f"{name}: expected a number, found {wrong[0]!r}")
        return {kind(key): _read(item_kind, item, f"{name}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, name)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if kind is float:
        return _read_number(value, name)
    if kind in _PLAIN:
        if isinstance(value, bool) is not (kind is bool):
            raise ValueError(f"{name}: expected {kind.__name__}, found {value!r}")
        return _require(value, kind, name)
    raise TypeError(f"{name}: fields of type {kind} cannot be read")


def _read_dataclass(kind: Any, value: Any, name: str) -> Any:
    _require(value, dict, name)
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    if unknown := sorted(set(value) - set(fields)):
        raise ValueError(f"{name}: unknown field {unknown[0]}")
    missing = [
        field.name
        for field in fields.values()
        if field.name not in value
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{name}: the field {missing[0]} is missing")
    return kind(**{key: _read(hints[key], item, f"{name}.{key}") for key, item in value.items()})


def _read_union(arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    kinds = [kind for kind in arguments if kind is not type(None)]
    for kind in kinds[:-1]:
        try:
            return _read(kind, value, name)
        except ValueError:
            continue
    return _read(kinds[-1], value, name)


def _read_sequence(origin: Any, arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    _require(value, list, name)
    if origin is tuple and arguments[-1] is not Ellipsis:
        if len(arguments) != len(value):
            raise ValueError(f"{name}: expected {len(arguments)} entries, found {len(value)}")
        return tuple(_read(kind, item, name) for kind, item in zip(arguments, value, strict=True))
    items = [_read(arguments[0], item, f"{name}[{index}]") for index, item in enumerate(value)]
    return items if origin is list else tuple(items)


def _read_number(value: Any, name: str) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: expected a number, found {value!r}")
    return float(value)


def _require(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name}: expected {kind.__name__}, found {type(value).__name__}")
    return value
