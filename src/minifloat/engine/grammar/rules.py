"""`Grammar`: rules that a text must follow, from a JSON Schema."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from minifloat.errors import KernelUnavailable, UsageError

MAX_SCHEMA_BYTES = 64 << 10
#: White space as `json.dumps` writes it: if any amount is allowed, a weak model may write nothing else.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Grammar:
    """The rules that a text must follow."""

    source: str

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str) -> Grammar:
        """Return the grammar of the JSON that a schema accepts."""
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
        except (RecursionError, TypeError, ValueError) as error:
            raise UsageError(f"json_schema: not JSON, or nested too deep: {error}") from error
        if len(text) > MAX_SCHEMA_BYTES:
            raise UsageError(f"json_schema: expected at most {MAX_SCHEMA_BYTES} bytes, got {len(text)}")
        try:
            return cls(_llguidance().LLMatcher.grammar_from_json_schema(text, defaults=_SPACING))
        except ValueError as error:
            raise UsageError(f"json_schema: {error}") from error

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of any JSON object."""
        return cls.json_schema({"type": "object"})


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise KernelUnavailable("JSON output needs llguidance: pip install 'minifloat[serve]'") from error
    return llguidance
