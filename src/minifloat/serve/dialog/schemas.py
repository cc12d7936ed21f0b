"""What a parser must know of a tool's JSON schema: which values are texts where the format does not say so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

#: References that are followed, and alternatives that are looked at.
_MAX_STEPS = 100
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def property_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that a property of a schema may have; empty if the schema does not say."""
    types: set[str] = set()
    properties = parameters.get("properties")
    todo = [properties.get(name) if isinstance(properties, Mapping) else None]
    for _ in range(_MAX_STEPS):
        if not todo:
            return frozenset(types)
        types |= set(_types(todo.pop(), parameters, todo))
    return frozenset()


def _types(schema: Any, root: Mapping[str, Any], todo: list[Any]) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    stated = schema.get("type")
    if isinstance(stated, str):
        yield stated
    elif isinstance(stated, list):
        yield from (each for each in stated if isinstance(each, str))
    elif "enum" in schema or "const" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        yield from {_type_of(value) for value in values}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        todo.append(found)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            todo.extend(schema[word])


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", type(None): "null"}
    return names.get(type(value), "object")


def value_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that stands without quotes: by its types, or else a string if it is no JSON."""
    stripped = text.strip()
    try:
        value = _PYTHON_WORDS[stripped] if stripped in _PYTHON_WORDS else json.loads(stripped)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    found = _type_of(value)
    suits = not types or found in types or (found == "integer" and "number" in types)
    return written if suits or "string" not in types else json.dumps(text, ensure_ascii=False)
