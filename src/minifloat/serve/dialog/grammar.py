"""Grammars of whole answers: thinking first, then calls in the frame of the format with each tool's schema inside.

They make calls that violate a schema impossible: with `required` from the first token on, with `strict` tools that may
be called from what begins a call on. With `none` they make all calls impossible: the prompt tells the tools all the
same, so that it is the cached one. The answer's own grammar begins after the thinking.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minifloat.engine.grammar import Grammar
from minifloat.engine.lark import TEXT, Rules, json_value, literal, one_of, pattern
from minifloat.errors import UsageError
from minifloat.serve.dialog.conversation import Conversation, Tool
from minifloat.serve.dialog.formats import DialogFormat, Elements, opens_thinking
from minifloat.serve.dialog.schemas import property_types, resolved

#: Bytes of the rules of all calls.
MAX_BYTES = 1 << 19
MAX_DEPTH = 32
#: What rules without quotes keep of a schema, and what only describes it.
_KEPT = {
    *("type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum", "const"),
    *("anyOf", "oneOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("pattern", "minLength", "maxLength", "format", "$defs", "definitions", "title", "description", "default"),
    *("examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment", "nullable", "strict"),
}
_ANY: dict[str, Any] = {"type": "object"}
_KEY = r"[A-Za-z_][A-Za-z0-9_]{0,63}"


def call_grammar(format: DialogFormat, conversation: Conversation, prompt_end: str) -> Grammar | None:
    """Return the grammar of an answer; None: it may be any text.

    Args:
        format: How the model writes calls and thinking.
        conversation: What is answered.
        prompt_end: The end of the rendered prompt, which may open the thinking.
    """
    tools, own = conversation.callable_tools, conversation.grammar
    required = bool(tools) and conversation.choice.mode == "required"
    excluded = own is None and bool(conversation.tools) and conversation.choice.mode == "none"
    if own is None and not required and not excluded and not any(tool.strict for tool in tools):
        return None
    if not tools and not excluded and not (format.thinking or format.channels):
        return own
    writer = _Writer(format, conversation.parallel)
    calls = writer.calls([(tool, tool.parameters if required or tool.strict else _ANY) for tool in tools])
    answer = None if own is None else writer.rules.other(own.source)
    if excluded:
        answer = writer.without_calls()
    if format.channels:
        rest = writer.messages(calls, answer, required)
    else:
        opened = opens_thinking(format, prompt_end, conversation.continues)
        may_think = conversation.thinking.enabled is not False
        rest = writer.thinking(opened, may_think) + " " + writer.answer(calls, answer, required)
    return Grammar(writer.rules.source(rest), own.field if own is not None else "tools")


class _Writer:
    """Writes the rules of answers in one format."""

    def __init__(self, format: DialogFormat, parallel: bool) -> None:
        self.format, self.parallel, self.rules = format, parallel, Rules()

    def text(self, text: str) -> str:
        return literal(text, self.format.tokens)

    # -------------------------------------------------------------------------- the answer

    def thinking(self, opened: bool, may_think: bool) -> str:
        """Return the expression of the thinking before the answer, and the blank lines after it."""
        if self.format.thinking is None or not (opened or may_think):
            return ""
        begin, end = self.format.thinking
        thought = f'{self.rules.until(end, self.format.tokens)} ("\\n" | "\\n\\n")?'
        return thought if opened else f"({self.text(begin)} {thought})?"

    def answer(self, calls: Sequence[str], answer: str | None, required: bool) -> str:
        """Return the expression of what follows the thinking."""
        frame = self.frame(calls) if calls else ""
        if required:
            return frame
        if answer is not None:
            return one_of(frame, answer) if frame else answer
        if self.format.bare:  # a text that does not begin like a call
            return one_of(frame, self.rules.add(r"/([^\[{\s](.|\n)*)?/"))
        items = [
            f"{self.rules.until(begin, self.format.tokens)} {self.frame(calls, begin)}" for begin in self.format.begin
        ]
        item, text = self.rules.add(one_of(*items)), self.rules.add(TEXT)
        return f"{item}* {text}" if self.parallel else one_of(item, text)

    def without_calls(self) -> str:
        """Return the expression of a text without what begins a call; a text holds no marker that is a token."""
        begins = [each for each in self.format.begin if not any(token in each for token in self.format.tokens)]
        others = [rf"~/(.|\n)*{pattern(re.escape(each))[1:-1]}(.|\n)*/" for each in begins]
        return self.rules.add(" & ".join((TEXT, *others)), terminal=True)

    def messages(self, calls: Sequence[str], answer: str | None, required: bool) -> str:
        """Return the expression of gpt-oss's messages, after the header that the prompt has begun."""
        text, end = self.text, self.rules.until("<|end|>", self.format.tokens)
        following = f"{end} {text('<|start|>assistant')}"
        thought = f"({text('<|channel|>analysis<|message|>')} {following})?"
        last = [f"{text('<|channel|>commentary to=functions.')} {one_of(*calls)}"] if calls else []
        if not required:
            last.append(f"{text('<|channel|>final<|message|>')} {answer or self.rules.add(TEXT)}")
        preamble = f"({text('<|channel|>commentary<|message|>')} {following})?" if calls and answer is None else ""
        return f"{thought} {'' if required else preamble} {one_of(*last)}"

    # --------------------------------------------------------------------------- the calls

    def frame(self, calls: Sequence[str], begun: str | None = None) -> str:
        """Return the expression of calls, with what begins and ends them; `begun`: what is written of it already."""
        format = self.format
        begin, opened = self.text(format.begin[0]), self.text(format.open[0])
        call = self.rules.add(f"{opened} {one_of(*calls)}")
        gap = self.text(format.gap)  # apart, because the lexer never goes back to a shorter literal
        last = (
            self.text("]" * format.list)
            if format.bare
            else f"{self.text(']' * format.list)} {gap} {self.text(format.end)}"
        )
        more = (
            f"({self.text(format.separator or '')} {call})*" if format.separator is not None and self.parallel else ""
        )
        if begun is not None and begun in format.open:
            return f"{one_of(*calls)} {more} {last}"
        whole = f"{gap} {self.text('[' * format.list)} {call} {more} {last}"
        if begun is not None or format.bare:
            return whole
        again = f'("\\n"? {begin} {whole})*' if format.separator is None and self.parallel else ""
        return f"{begin} {whole} {again}"

    def calls(self, tools: Sequence[tuple[Tool, Mapping[str, Any]]]) -> list[str]:
        """Return the expressions of calls after what opens them."""
        names, size = [], 0
        for tool, schema in tools:
            call = self._call(tool, schema)
            size += len(call)
            if size > MAX_BYTES:
                raise UsageError(f"tools: their grammar has more than {MAX_BYTES} bytes; offer fewer or smaller ones")
            names.append(self.rules.add(call))
        return names

    def _call(self, tool: Tool, schema: Mapping[str, Any]) -> str:
        format = self.format
        schema = _checked(tool, schema)
        name = json.dumps(tool.name, ensure_ascii=False)
        if format.arguments == "object":
            before = f'{{"name": {name}, "{format.key}": '
            return f"{self.text(before)} {json_value(schema)} {literal('}')}"
        if format.channels:
            return f"{self.text(f'{tool.name} <|constrain|>json<|message|>')} {json_value(schema)}"
        number = " /:[0-9]{1,3}/ " if format.numbered else ""
        if format.arguments != "json":
            schema = _rooted(schema, resolved(schema, schema))
        before = f"{self.text(tool.name)}{number}"
        arguments = {
            "json": lambda: f"{self.text(format.name_end[0])} {json_value(schema)}",
            "elements": lambda: self._elements(tool, schema),
            "python": lambda: f"{self.text('(')} {self._arguments(tool, schema, ', ', self._keyword)} {self.text(')')}",
            "gemma": lambda: self._value(tool, schema, schema),
        }[format.arguments]()
        return f"{before} {arguments} {self.text(format.close)}"

    def _arguments(
        self, tool: Tool, schema: Mapping[str, Any], separator: str, write: Callable[[Tool, Any, str, Any], str]
    ) -> str:
        """Return the expression of the properties of an object in their order; optional ones may be left out."""
        needed = set(schema.get("required") or ())
        first, rest = "", ""
        for key, value in reversed(list(_properties(schema).items())):
            pair = self.rules.add(write(tool, schema, key, value))
            more, alone = f"{self.text(separator)} {pair} {rest}", f"{pair} {rest}"
            first = self.rules.add(alone if key in needed else one_of(alone, first))
            rest = self.rules.add(more if key in needed else one_of(more, rest))
        return first

    def _keyword(self, tool: Tool, root: Mapping[str, Any], key: str, schema: Any) -> str:
        if not key.isidentifier():
            raise UsageError(f"tools: {tool.name}: {key!r} is no name of an argument in the format {self.format.name}")
        return f"{self.text(f'{key}=')} {self._value(tool, root, schema)}"

    # ------------------------------------------------------------------- values without quotes

    def _elements(self, tool: Tool, schema: Mapping[str, Any]) -> str:
        elements, format = self.format.elements, self.format
        assert elements is not None
        first = format.name_end[0]
        before = "" if first in (elements.open, format.end) else first
        begin = self.text(before if before.endswith("\n") else before + elements.gap)
        if not _properties(schema) and schema.get("additionalProperties") is not False:
            any_key = self._element(elements, pattern(_KEY), self._text({}, {}, self._value_end), text=True)
            return f"{begin} ({any_key})*"
        return f"{begin} {self._arguments(tool, schema, '', self._keyed)}"

    @property
    def _value_end(self) -> str:
        elements = self.format.elements
        assert elements is not None
        return "\n" * elements.lines + elements.close

    def _keyed(self, tool: Tool, root: Mapping[str, Any], key: str, schema: Any) -> str:
        elements, types = self.format.elements, property_types(root, key)
        assert elements is not None
        if not types or "string" in types:
            return self._element(elements, self.text(key), self._text(root, schema, self._value_end), text=True)
        value = f"{json_value(_rooted(root, schema))} {self.text(self._value_end)}"
        return self._element(elements, self.text(key), value, text=False)

    def _element(self, elements: Elements, key: str, value: str, *, text: bool) -> str:
        """Return the expression of an element; the value brings its end."""
        typed = f'"{str(text).lower()}">' if elements.typed else ""
        middle = self.text(elements.middle + typed + "\n" * elements.lines)
        return f"{self.text(elements.open)} {key} {middle} {value} {literal(elements.gap)}"

    def _text(self, root: Mapping[str, Any], schema: Any, end: str) -> str:
        """Return the expression of a text without quotes, or JSON where it may be no text, and of what ends it."""
        schema, after = resolved(schema, root), self.text(end)
        choices = next((schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list)), None)
        if choices is not None:
            texts = [each for each in choices if _types(each, root) is None or "string" in (_types(each, root) or ())]
            others = [f"{json_value(_rooted(root, each))} {after}" for each in choices if each not in texts]
            return one_of(*(self._text(root, each, end) for each in texts), *others)
        if (values := _values(schema)) is not None:
            written = (value if isinstance(value, str) else json.dumps(value) for value in values)
            return f"{one_of(*map(self.text, written))} {after}"
        if not schema.keys() & {"pattern", "minLength", "maxLength"}:
            return self.rules.until(end, self.format.tokens)
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        wanted = schema.get("pattern", "")
        parts = [pattern(f"(?s:.*)(?:{wanted})(?s:.*)") if wanted else TEXT, f"/(?s:.){{{low},{high}}}/"]
        if wanted.startswith("^") or wanted.endswith("$"):
            front, back = "" if wanted.startswith("^") else "(?s:.*)", "" if wanted.endswith("$") else "(?s:.*)"
            parts[0] = pattern(f"{front}(?:{wanted.removeprefix('^').removesuffix('$')}){back}")
        without = f"~{pattern(f'(?s:.*){re.escape(end.strip())}(?s:.*)')}"
        text = f"{self.rules.add(' & '.join((*parts, without)), terminal=True)} {after}"
        others = [each for each in schema["type"] if each != "string"] if isinstance(schema.get("type"), list) else []
        return one_of(text, f"{json_value({**_rooted(root, schema), 'type': others})} {after}") if others else text

    def _value(self, tool: Tool, root: Mapping[str, Any], schema: Any, depth: int = 0) -> str:
        """Return the expression of a value as Python or Gemma writes it."""
        if depth > MAX_DEPTH:
            raise UsageError(f"tools: {tool.name}: parameters: nested deeper than {MAX_DEPTH}, or a $ref in a circle")
        reference, schema = isinstance(schema, Mapping) and "$ref" in schema, resolved(schema, root)
        unknown = sorted(schema.keys() - _KEPT)
        if (unknown or reference) and not self._is_gemma:
            return json_value(_rooted(root, schema))  # Python reads JSON too
        if unknown:
            raise UsageError(f"tools: {tool.name}: parameters: {unknown[0]!r} is not possible in {self.format.name}")
        nested = functools.partial(self._value, tool, root, depth=depth + 1)
        if (values := _values(schema)) is not None:
            return one_of(*(self.text(self._written(value)) for value in values))
        choices = next((schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list)), None)
        if choices is None and isinstance(schema.get("type"), list):
            choices = [schema | {"type": each} for each in schema["type"]]
        if choices is not None:
            return one_of(*(self.rules.add(nested(each)) for each in choices))
        comma, kind = self.text(self._comma), schema.get("type")
        if kind == "array" and {"items", "minItems", "maxItems"} & schema.keys():
            item = self.rules.add(nested(schema.get("items", {})))
            return f"{self.text('[')} {_repeated(item, comma, schema)} {self.text(']')}"
        if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping) and not _properties(schema):
            each = self.rules.add(f"{self._any_key()} {nested(schema['additionalProperties'])}")
            return f"{self.text('{')} {_repeated(each, comma, {})} {self.text('}')}"
        if kind == "object" and (_properties(schema) or schema.get("additionalProperties") is False):
            properties = _properties(schema)
            ordered = schema | {"properties": dict(sorted(properties.items())) if self._is_gemma else properties}

            def pair(_: Tool, __: Mapping[str, Any], key: str, value: Any) -> str:
                return f"{self.text(self._key(key))} {nested(value)}"

            return f"{self.text('{')} {self._arguments(tool, ordered, self._comma, pair)} {self.text('}')}"
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            return json_value(schema)
        words = {"boolean": (True, False), "null": (None,)}.get(str(kind))
        return one_of(*(self.text(self._written(word)) for word in words)) if words else self._any(str(kind))

    def _string(self, schema: Mapping[str, Any]) -> str:
        if self._is_gemma:
            return f"{self.text(self.format.quote)} {self._text({}, schema, self.format.quote)}"
        if schema.keys() & {"pattern", "minLength", "maxLength", "format"}:
            return json_value(schema)  # Python reads JSON's strings
        return self.rules.add(r"/'([^'\\\x00-\x1f]|\\['\"\\nrt])*'|\"([^\"\\\x00-\x1f]|\\['\"\\nrt])*\"/")

    def _any(self, kind: str) -> str:
        """Return the expression of any value, any object or any array."""
        comma = self.text(self._comma)
        pairs, items = _repeated(f"{self._any_key()} any_value", comma, {}), _repeated("any_value", comma, {})
        self.rules.named("any_object", f"{self.text('{')} {pairs} {self.text('}')}")
        self.rules.named("any_array", f"{self.text('[')} {items} {self.text(']')}")
        words = (self.text(self._written(word)) for word in (True, False, None))
        number = json_value({"type": "number"})
        self.rules.named("any_value", one_of("any_object", "any_array", self._string({}), number, *words))
        return {"object": "any_object", "array": "any_array"}.get(kind, "any_value")

    def _any_key(self) -> str:
        key = pattern(_KEY) if self._is_gemma else self._string({})
        return f"{key} {self.text(':' if self._is_gemma else ': ')}"

    @property
    def _is_gemma(self) -> bool:
        return self.format.arguments == "gemma"

    @property
    def _comma(self) -> str:
        return "," if self._is_gemma else ", "

    def _key(self, key: str) -> str:
        return f"{key}:" if self._is_gemma else f"{key!r}: "

    def _written(self, value: Any) -> str:
        """Return a value as Python or Gemma writes it."""
        if not self._is_gemma:
            return repr(value)
        if isinstance(value, str):
            return f"{self.format.quote}{value}{self.format.quote}"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self._written(item)}' for key, item in sorted(value.items()))}}}"
        return f"[{','.join(map(self._written, value))}]" if isinstance(value, list) else json.dumps(value)


def _repeated(item: str, comma: str, schema: Mapping[str, Any]) -> str:
    """Return the expression of items with commas between them, as many as the schema of an array allows."""
    low, high = schema.get("minItems", 0), schema.get("maxItems")
    if high is not None and high < max(low, 1):
        return ""
    more = f"({comma} {item}){{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
    return f"({item} {more})" if low else f"({item} {more})?"


def _types(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the JSON types of a schema; None: it does not say."""
    return property_types({**_rooted(root, {}), "properties": {"it": schema}}, "it") or None


def _checked(tool: Tool, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments."""
    if schema.get("type", "object") != "object":
        raise UsageError(f'tools: {tool.name}: parameters: expected "type": "object", got {schema["type"]!r}')
    schema = {**schema, "type": "object"}
    try:
        reason = _refusal(json.dumps(schema))
    except (RecursionError, TypeError, ValueError) as error:
        reason = f"not JSON, or nested too deep: {error}"
    if reason:
        raise UsageError(f"tools: {tool.name}: parameters: {reason}")
    return schema


@functools.lru_cache(maxsize=256)  # the turns of a dialog have the same tools
def _refusal(schema: str) -> str:
    """Return why no grammar can be made of a schema; empty: one can."""
    try:
        Grammar.json_schema(schema).check()
    except UsageError as error:
        return str(error)
    return ""


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists; None: it lists none."""
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [schema["const"]] if "const" in schema else None


def _rooted(root: Mapping[str, Any], schema: Any) -> Mapping[str, Any]:
    """Return the schema of a property with the definitions that it may refer to."""
    if not isinstance(schema, Mapping):
        return {}
    return {**{word: root[word] for word in ("$defs", "definitions") if word in root}, **schema}
