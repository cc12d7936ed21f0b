"""Types of the fields of requests, validated by pydantic with a bound on every size.

A field that a request does not declare is refused by name, never ignored. Values are not converted: a string is no
number, a boolean is no integer. Lists and texts are bounded here, so that nothing large is tokenized or compiled.
`Engine.check` judges the rest, such as the room in the context.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from minifloat.engine.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOPS
from minifloat.serve.server.errors import NOT_UNICODE

_Value = TypeVar("_Value")

MAX_CHOICES = 8
MAX_PROMPTS = 64
MAX_MESSAGES = 1024
MAX_PARTS = 256
MAX_STOP_CHARACTERS = 256
MAX_BAD_WORDS = 256
MAX_SCHEMA_NODES = 20_000
MAX_SCHEMA_DEPTH = 64
#: Longest list of tokens: longer than any model's context, short enough to validate quickly.
MAX_TOKENS = 4_194_304

#: Title by which `openapi.describe` finds the schemas of token ids, to add their maximum.
TOKEN_TITLE = "Token id"

_TOKEN_MAX = 2**31 - 1
_SEED_MIN, _SEED_MAX = -(2**63), 2**63 - 1


def one_of(expected: str) -> WrapValidator:
    """Return a validator that reports one message for a union, instead of one per alternative."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise ValueError(f"expected {expected}") from error

    return WrapValidator(validate)


def whole(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Accept 3.0 as the integer 3, alone or in a list, because JSON has one kind of number. Convert nothing else."""
    try:
        return handler(value)
    except ValidationError:
        if isinstance(value, float) and value.is_integer():
            return handler(int(value))
        if not isinstance(value, list) or not any(isinstance(item, float) for item in value):
            raise
        return handler([int(item) if isinstance(item, float) and item.is_integer() else item for item in value])


_SURROGATE = re.compile("[\ud800-\udfff]")


def is_unicode(value: Any) -> Any:
    """Refuse a text, or a list of texts or parts, with half of a surrogate pair. Accept all other values."""
    for item in value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]:
        text = getattr(item, "text", item)
        if isinstance(text, str) and not text.isascii() and _SURROGATE.search(text):
            raise ValueError(NOT_UNICODE)
    return value


Unicode = AfterValidator(is_unicode)
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES), WrapValidator(whole)]
Count = Annotated[int, Field(ge=1, le=_TOKEN_MAX), WrapValidator(whole)]
Natural = Annotated[int, Field(ge=0, le=_TOKEN_MAX), WrapValidator(whole)]
TopK = Annotated[int, Field(ge=-1, le=_TOKEN_MAX), WrapValidator(whole)]
Seed = Annotated[int, Field(ge=_SEED_MIN, le=_SEED_MAX), WrapValidator(whole)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WrapValidator(whole)]
Token = Annotated[StrictInt, Field(ge=0, le=_TOKEN_MAX, title=TOKEN_TITLE)]
TokenList = Annotated[list[Token], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True), WrapValidator(whole)]
Prompt = Annotated[
    str
    | TokenList
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenList], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)],
    Field(union_mode="left_to_right"),
    one_of(
        f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either; token ids are integers "
        f"from 0 on, and no list is empty"
    ),
    Unicode,
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)],
    one_of(f"a string, or at most {MAX_STOPS} strings, of 1 to {MAX_STOP_CHARACTERS} Unicode characters"),
]


BadWords = Annotated[
    list[StopString],
    Field(max_length=MAX_BAD_WORDS, fail_fast=True),
    one_of(f"at most {MAX_BAD_WORDS} strings of 1 to {MAX_STOP_CHARACTERS} Unicode characters"),
    Unicode,
]
Priority = Annotated[int, Field(ge=-_TOKEN_MAX, le=_TOKEN_MAX), WrapValidator(whole)]


def implies(field: str, value: dict[str, Any], **required: Any) -> dict[str, Any]:
    """Return a JSON schema: if `field` matches the schema `value`, other fields must have the `required` values."""
    condition = {"required": [field], "properties": {field: value}}
    consequence = {
        "required": [name for name, value in required.items() if value],
        "properties": {name: {"const": value} for name, value in required.items()},
    }
    return {"if": condition, "then": consequence}


class Strict(BaseModel):
    """A model that refuses unknown fields, conversions, NaN and Infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


LogitBias = Annotated[
    Annotated[
        dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_LOGIT_BIAS, json_schema_extra={"additionalProperties": False}),
    ],
    one_of(f"at most {MAX_LOGIT_BIAS} token ids, as strings, with values of -100 to 100"),
]


def check_size(value: _Value) -> _Value:
    """Refuse a value that is too large or too deep for grammars and templates, or is not Unicode."""
    level: list[Any] = [value]
    nodes = 0
    for _ in range(MAX_SCHEMA_DEPTH):
        nodes += len(level)
        if not level:
            return value
        if nodes > MAX_SCHEMA_NODES:
            raise ValueError(f"it has more than {MAX_SCHEMA_NODES} values")
        kinds = {*map(type, level)}  # so that long lists of numbers are looked at once
        strings = [node for node in level if isinstance(node, str)] if str in kinds else []
        objects = [node for node in level if isinstance(node, dict)] if dict in kinds else []
        lists = [node for node in level if isinstance(node, list)] if list in kinds else []
        for texts in (strings, *objects):
            if _SURROGATE.search("".join(texts)):
                raise ValueError(NOT_UNICODE)
        level = [*chain.from_iterable(each.values() for each in objects), *chain.from_iterable(lists)]
    raise ValueError(f"it is nested more than {MAX_SCHEMA_DEPTH} deep")


#: An object that is small and shallow enough for templates and grammars.
Json = Annotated[dict[str, Any], AfterValidator(check_size)]


class TextFormat(Strict):
    """Format of the answer: free text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Format of the answer: any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema that the answer follows."""

    name: str = Field(default="answer", max_length=64)
    description: str | None = Field(default=None, max_length=4096, description="Has no effect.")
    schema_: Json = Field(alias="schema")
    strict: bool | None = Field(default=None, description="The schema is always followed strictly.")


class JsonSchemaFormat(Strict):
    """Format of the answer: JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema
