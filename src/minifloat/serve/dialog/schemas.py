"""What a parser must know of a tool's JSON schema: which values are texts where the format does not say so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

#: References that are followed, and alternatives that are looked at.
_MAX_STEPS = 100
_MAX_DEPTH = 16
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def resolved(schema: Any, root: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Return a schema with its local references followed and its `allOf` merged; empty if there is none."""
    for _ in range(_MAX_STEPS):
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            break
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            parts = [resolved(part, root, depth + 1) for part in _list(schema.get("allOf"))]
            own = {word: value for word, value in schema.items() if word != "allOf"}
            return _merged([*parts, own]) if parts else own
        found: Any = root
        for part in filter(None, reference[1:].split("/")):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        schema = found
    return {}


def _merged(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for schema in schemas:
        for word, value in schema.items():
            before = merged.get(word)
            if word == "properties" and isinstance(before, Mapping) and isinstance(value, Mapping):
                merged[word] = {**before, **value}
            elif word == "required" and isinstance(before, list) and isinstance(value, list):
                merged[word] = [*before, *value]
            else:
                merged[word] = value
    return merged


def property_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that a property of a schema may have; empty if the schema does not say."""
    types: set[str] = set()
    properties = resolved(parameters, parameters).get("properties")
    todo = [properties.get(name) if isinstance(properties, Mapping) else None]
    for _ in range(_MAX_STEPS):
        if not todo:
            break
        schema = resolved(todo.pop(), parameters)
        types |= set(_types(schema))
        todo += [each for word in ("anyOf", "oneOf") for each in _list(schema.get(word))]
    return frozenset() if todo else frozenset(types)


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    stated = schema.get("type")
    if isinstance(stated, str):
        yield stated
    elif isinstance(stated, list):
        yield from (each for each in stated if isinstance(each, str))
    elif "enum" in schema or "const" in schema:
        yield from {
            _type_of(value) for value in (*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else []))
        }


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", type(None): "null"}
    return names.get(type(value), "object")


def value_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that stands without quotes: by its types, or else a string if it is no JSON."""
    written = text.strip()
    try:
        value = _PYTHON_WORDS[written] if written in _PYTHON_WORDS else json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if written in _PYTHON_WORDS:
        written = json.dumps(value)
    found = _type_of(value)
    suits = not types or found in types or (found == "integer" and "number" in types)
    return written if suits or "string" not in types else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
