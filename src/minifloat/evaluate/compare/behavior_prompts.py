"""Prompts for `compare --behavior`: JSON Lines of chats with tools or a JSON schema, and how answers are marked.

A line has the fields of ``/v1/chat/completions``, and what a good answer does. It is sent as it stands, but that no
grammar holds the answer: what a model does freely is measured. A schema is told to the model, as clients tell it to
servers without grammars.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from pydantic import Field, ValidationError
from referencing import Registry

from minifloat.checkpoint.files import storage_errors
from minifloat.errors import DataError, MinifloatError
from minifloat.evaluate.compare.behavior import ARGUMENTS, CALLS, FUNCTIONS, SCHEMA, Answer, PromptNames
from minifloat.serve.api.chat import ChatFields, Messages
from minifloat.serve.api.fields import Json, JsonSchemaFormat, Seed, Strict, check_size
from minifloat.serve.api.items import Effort, ToolName, check_tools
from minifloat.serve.dialog.conversation import ToolChoice
from minifloat.serve.dialog.schemas import resolved
from minifloat.serve.server.errors import APIError, from_validation

#: Name of the prompts that come with minifloat.
BUILT_IN = "builtin"
MAX_BYTES = 64 << 20
MAX_LINE_BYTES = 1 << 20
MAX_PROMPTS = 10_000
_MAX_CALLS = 64
_SCHEMA_NOTE = "\n\nAnswer with JSON that follows this schema, and with nothing else:\n"
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?```", re.DOTALL)
#: Longest text of an answer in a report.
_SAID = 2000


class ExpectedCall(Strict):
    """A call of a good answer; without arguments, any that follow the schema of the tool are good."""

    name: ToolName
    arguments: Json | None = None


class PromptLine(ChatFields):
    """A line of the file."""

    name: str = Field(default="", max_length=200)
    messages: Messages
    response_format: JsonSchemaFormat | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    temperature: float = Field(default=0.0, ge=0, le=100)
    seed: Seed | None = None
    expected: Annotated[list[ExpectedCall], Field(max_length=_MAX_CALLS)] | None = None


_NOT_SENT = ("name", "expected", "response_format")


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        body: Of the request, without the model's name.
        tools: Of each tool, what validates its arguments.
        schema: What validates the answer of a prompt without tools.
        expected: The calls of a good answer, with None for any arguments; None: not stated.
    """

    name: str
    question: str
    body: Mapping[str, Any]
    tools: Mapping[str, Validator]
    schema: Validator | None
    expected: tuple[tuple[str, str | None], ...] | None

    def marked(self, body: Any) -> Answer:
        """Return the answer in a body of ``/v1/chat/completions``."""
        try:
            (choice,) = body["choices"]
            message, usage = choice["message"], body.get("usage") or {}
            text = message.get("content") or ""
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            written = [(str(function["name"]), function["arguments"]) for function in functions]
            thinking = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{self.name}: the answer is none of /v1/chat/completions: {error!r}") from error
        calls = [(name, _parsed(arguments)) for name, arguments in written]
        said = "\n".join(filter(None, (text, *(f"{name}({arguments})" for name, arguments in written))))
        return Answer(
            said=said if len(said) <= _SAID else f"{said[:_SAID]}…",
            calls=tuple(sorted((name, _canonical(arguments)) for name, arguments in calls)),
            marks=self._marks(text, calls),
            thinking_tokens=thinking if isinstance(thinking, int) else None,
            cut_off=choice.get("finish_reason") == "length",
            prompt_tokens=usage.get("prompt_tokens"),
        )

    def _marks(self, text: str, calls: Sequence[tuple[str, Any]]) -> dict[str, bool]:
        if self.schema is not None:
            fenced = _FENCE.fullmatch(text.strip())
            return {SCHEMA: self._satisfies(self.schema, _parsed(fenced[1] if fenced else text))}
        marks = {}
        if self.expected != ():
            valid = [name in self.tools and self._satisfies(self.tools[name], value) for name, value in calls]
            marks[CALLS] = bool(valid) and all(valid)
        if self.expected is not None:
            marks[FUNCTIONS] = sorted(name for name, _ in calls) == [name for name, _ in self.expected]
        if self.expected and all(arguments is not None for _, arguments in self.expected):
            marks[ARGUMENTS] = sorted((name, _canonical(value)) for name, value in calls) == list(self.expected)
        return marks

    def _satisfies(self, validator: Validator, value: Any) -> bool:
        return value is not _NO_JSON and bool(validator.is_valid(value))


_NO_JSON = object()


def _parsed(text: Any) -> Any:
    """Return the value of a JSON text that is not too large or too deep; 3.0 is 3."""

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):  # also NaN and Infinity, which are no JSON
            raise ValueError
        return int(value) if value.is_integer() else value

    try:
        value = json.loads(text, parse_float=number, parse_constant=number)
        check_size(value)
    except (TypeError, ValueError, RecursionError):
        return _NO_JSON
    return value


def _canonical(value: Any) -> str:
    return "" if value is _NO_JSON else json.dumps(value, sort_keys=True)


@dataclass(frozen=True)
class Prompts:
    """All prompts of a file, and the largest number of tokens of an answer."""

    source: str
    sha256: str
    prompts: tuple[Prompt, ...]
    new_tokens: int

    @classmethod
    def read(cls, source: str, new_tokens: int) -> Prompts:
        """Read a file, or the prompts that come with minifloat."""
        data = _bytes_of(source)
        lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
        if not lines:
            raise DataError(f"{source}: no prompts; write one JSON object per line")
        if len(lines) > MAX_PROMPTS:
            raise DataError(f"{source}: {len(lines):,} prompts; at most {MAX_PROMPTS:,} are read: split the file")
        prompts = []
        for number, line in lines:
            try:
                prompts.append(_prompt(line, number))
            except MinifloatError as error:
                raise DataError(f"{source}, line {number}: {error}") from error
        return cls(Path(source).name, hashlib.sha256(data).hexdigest(), tuple(prompts), new_tokens)

    @property
    def names(self) -> PromptNames:
        return PromptNames(
            source=self.source,
            sha256=self.sha256,
            new_tokens=self.new_tokens,
            names=tuple(prompt.name for prompt in self.prompts),
            questions=tuple(prompt.question for prompt in self.prompts),
            with_tools=tuple(prompt.schema is None for prompt in self.prompts),
        )

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The requests, without the model's name."""
        return [{**prompt.body, "max_tokens": self.new_tokens} for prompt in self.prompts]

    def marked(self, bodies: Sequence[Any]) -> tuple[Answer, ...]:
        return tuple(prompt.marked(body) for prompt, body in zip(self.prompts, bodies, strict=True))


def _bytes_of(source: str) -> bytes:
    if source == BUILT_IN:
        return (resources.files("minifloat.evaluate.compare") / "texts" / "behavior.jsonl").read_bytes()
    path = Path(source)
    if not path.is_file():
        raise DataError(f"{source}: no such file; --behavior takes a file of JSON Lines, or {BUILT_IN}")
    with storage_errors(path, "read it"), path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise DataError(f"{source}: more than {MAX_BYTES >> 20} MiB; split the file")
    return data


def _prompt(line: bytes, number: int) -> Prompt:
    if len(line) > MAX_LINE_BYTES:
        raise DataError(
            f"it has {len(line):,} bytes; at most {MAX_LINE_BYTES:,} are read: shorten its messages or tools"
        )
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}; write one object per line") from error
    known = PromptLine.model_fields
    unknown = sorted(fields.keys() - known) if isinstance(fields, dict) else []
    if unknown:
        raise DataError(f"unknown field {unknown[0]!r}; a prompt has {', '.join(sorted(known))}")
    try:
        read = PromptLine.model_validate(fields)
        conversation = read.conversation_of(read.messages)
        check_tools(conversation.tools, ToolChoice())
    except ValidationError as error:
        raise DataError(_reason(error)) from error
    except APIError as error:
        raise DataError(error.detail) from error
    name = read.name or f"line {number}"
    if bool(read.tools) == (read.response_format is not None):
        raise DataError("tools, response_format: a prompt has one of them, which its answer is judged by")
    question = next((str(each["content"]) for each in reversed(conversation.messages) if each["role"] == "user"), None)
    if question is None:
        raise DataError("messages: there is none of the role user; add the question")
    body = {"temperature": 0.0} | {key: value for key, value in fields.items() if key not in _NOT_SENT}
    if read.response_format is not None:
        if read.expected is not None:
            raise DataError("expected: it is for prompts with tools; leave it out, or state tools")
        schema = read.response_format.json_schema.schema_
        body["messages"] = _told(fields["messages"], schema)
        return Prompt(name, question, body, {}, _validator(schema, "response_format"), None)
    body["tools"] = [_without_strict(tool) for tool in fields["tools"]]
    tools = {tool.name: _validator(tool.parameters, f"tools: {tool.name}") for tool in conversation.tools}
    prompt = Prompt(name, question, body, tools, None, _expected(read.expected))
    for call in read.expected or ():
        _check_expected(prompt, call)
    return prompt


def _expected(calls: Sequence[ExpectedCall] | None) -> tuple[tuple[str, str | None], ...] | None:
    if calls is None:
        return None
    found = [
        (call.name, None if call.arguments is None else _canonical(_parsed(json.dumps(call.arguments))))
        for call in calls
    ]
    return tuple(sorted(found, key=lambda call: (call[0], call[1] or "")))


def _check_expected(prompt: Prompt, call: ExpectedCall) -> None:
    if call.name not in prompt.tools:
        raise DataError(f"expected: {call.name!r} is none of the tools {', '.join(sorted(prompt.tools))}")
    if call.arguments is None:
        return
    validator, value = prompt.tools[call.name], _parsed(json.dumps(call.arguments))
    if not prompt._satisfies(validator, value):
        reason = next(iter(validator.iter_errors(value))).message
        raise DataError(f"expected: the arguments of {call.name} do not follow the schema of the tool: {reason}")


def _validator(schema: Mapping[str, Any], field: str) -> Validator:
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except (SchemaError, RecursionError) as error:
        message = getattr(error, "message", str(error))
        raise DataError(f"{field}: no valid JSON schema: {message}") from error
    for reference in _references(schema):
        if not reference.startswith("#") or not resolved({"$ref": reference}, schema):
            raise DataError(f"{field}: {reference!r} leads nowhere in the schema; define it under $defs")
    validator = kind(schema, registry=Registry())  # which fetches nothing
    try:
        validator.is_valid({})
    except RecursionError as error:
        raise DataError(f"{field}: the schema goes in a circle; mend its $ref") from error
    return validator


def _references(value: Any) -> Iterator[str]:
    nested = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict) and isinstance(value.get("$ref"), str):
        yield value["$ref"]
    for each in nested:
        yield from _references(each)


def _reason(error: ValidationError) -> str:
    errors = [{**each, "loc": ("line", *each["loc"])} for each in error.errors()]
    return from_validation(errors).detail


def _told(messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return messages of which the last one of the user says the schema of the answer."""
    place = max(index for index, message in enumerate(messages) if message["role"] == "user")
    content, note = messages[place]["content"], _SCHEMA_NOTE + json.dumps(schema, ensure_ascii=False)
    told = content + note if isinstance(content, str) else [*content, {"type": "text", "text": note}]
    return [*messages[:place], {**messages[place], "content": told}, *messages[place + 1 :]]


def _without_strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {**tool, "function": function}
