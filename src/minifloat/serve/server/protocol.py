"""The requests of OpenAI's API, with vLLM's extensions, validated by pydantic with a bound on every size.

A field that is not declared here is refused by name, never ignored. Values are not converted: a string is no number, a
boolean is no integer. Lists and texts are bounded here, so that nothing large is tokenized or compiled. `Engine.check`
judges the rest, such as the room in the context.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from minifloat.engine.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOPS
from minifloat.serve.server.errors import NOT_UNICODE, FieldError

MAX_CHOICES = 8
MAX_PROMPTS = 64
MAX_MESSAGES = 1024
MAX_PARTS = 256
#: Log-probabilities of prompts in all answers to a request: one per token and alternative.
MAX_PROMPT_LOGPROBS = 1 << 19
MAX_STOP_CHARACTERS = 256
MAX_SCHEMA_NODES = 20_000
MAX_SCHEMA_DEPTH = 64
#: Longest list of tokens: longer than any model's context, short enough to validate quickly.
MAX_TOKENS = 4_194_304

#: Title by which `openapi.describe` finds the schemas of token ids, to add their maximum.
TOKEN_TITLE = "Token id"

_TOKEN_MAX = 2**31 - 1
_SEED_MIN, _SEED_MAX = -(2**63), 2**63 - 1

#: Fields of OpenAI's API that are not supported -> message.
_UNSUPPORTED = {
    "tools": "tool calls are not supported by this server",
    "tool_choice": "tool calls are not supported by this server",
    "parallel_tool_calls": "tool calls are not supported by this server",
    "functions": "tool calls are not supported by this server",
    "function_call": "tool calls are not supported by this server",
    "best_of": "best_of is not supported; ask for n answers and choose among them",
    "suffix": "insertion is not supported by this server",
    "audio": "only text is supported by this server",
    "modalities": "only text is supported by this server",
    "chat_template": "a template in a request is refused; start the server with --chat-template",
}


def _one_of(expected: str) -> WrapValidator:
    """Return a validator that reports one message for a union, instead of one per alternative."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise ValueError(f"expected {expected}") from error

    return WrapValidator(validate)


def _whole(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
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


def _is_unicode(value: Any) -> Any:
    """Refuse a text, or a list of texts or parts, with half of a surrogate pair. Accept all other values."""
    for item in value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]:
        text = item.text if isinstance(item, TextPart) else item
        if isinstance(text, str) and not text.isascii() and _SURROGATE.search(text):
            raise ValueError(NOT_UNICODE)
    return value


Unicode = AfterValidator(_is_unicode)
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES), WrapValidator(_whole)]
Count = Annotated[int, Field(ge=1, le=_TOKEN_MAX), WrapValidator(_whole)]
Natural = Annotated[int, Field(ge=0, le=_TOKEN_MAX), WrapValidator(_whole)]
TopK = Annotated[int, Field(ge=-1, le=_TOKEN_MAX), WrapValidator(_whole)]
Seed = Annotated[int, Field(ge=_SEED_MIN, le=_SEED_MAX), WrapValidator(_whole)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WrapValidator(_whole)]
Token = Annotated[StrictInt, Field(ge=0, le=_TOKEN_MAX, title=TOKEN_TITLE)]
TokenList = Annotated[list[Token], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True), WrapValidator(_whole)]
Prompt = Annotated[
    str
    | TokenList
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenList], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)],
    Field(union_mode="left_to_right"),
    _one_of(
        f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either; token ids are integers "
        f"from 0 on, and no list is empty"
    ),
    Unicode,
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)],
    _one_of(f"a string, or at most {MAX_STOPS} strings, of 1 to {MAX_STOP_CHARACTERS} Unicode characters"),
]


def _implies(field: str, value: dict[str, Any], **required: Any) -> dict[str, Any]:
    """Return a JSON schema: if `field` matches the schema `value`, other fields must have the `required` values."""
    condition = {"required": [field], "properties": {field: value}}
    consequence = {
        "required": [name for name, value in required.items() if value],
        "properties": {name: {"const": value} for name, value in required.items()},
    }
    return {"if": condition, "then": consequence}


class _Strict(BaseModel):
    """A model that refuses unknown fields, conversions, NaN and Infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


LogitBias = Annotated[
    Annotated[
        dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_LOGIT_BIAS, json_schema_extra={"additionalProperties": False}),
    ],
    _one_of(f"at most {MAX_LOGIT_BIAS} token ids, as strings, with values of -100 to 100"),
]


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: bool = Field(default=False, description="End with a chunk that has the usage and no choices.")


class TextFormat(_Strict):
    """Format of the answer: free text."""

    type: Literal["text"]


class JsonObjectFormat(_Strict):
    """Format of the answer: any JSON object."""

    type: Literal["json_object"]


class NamedSchema(_Strict):
    """A JSON schema that the answer follows."""

    name: str = Field(default="answer", max_length=64)
    description: str | None = Field(default=None, max_length=4096, description="Has no effect.")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(default=None, description="The schema is always followed strictly.")

    @field_validator("schema_")
    @classmethod
    def _bounded(cls, schema: dict[str, Any]) -> dict[str, Any]:
        _check_size(schema)
        return schema


class JsonSchemaFormat(_Strict):
    """Format of the answer: JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class SamplingRequest(_Strict):
    """Fields that both kinds of completions share."""

    model: str = Field(max_length=512, description="The served model's name, as /v1/models gives it.")
    n: Choices = Field(default=1, description="Answers per prompt.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=100, description="0: the most probable token.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: TopK | None = Field(default=None, description="0 or -1: all tokens.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    seed: Seed | None = None
    max_tokens: Count | None = None
    min_tokens: Natural = 0
    stop: Stop | None = None
    stop_token_ids: Annotated[list[Token], WrapValidator(_whole)] = Field(default=[], max_length=MAX_STOPS)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logit_bias: LogitBias | None = None
    response_format: ResponseFormat | None = None
    cache_salt: str | None = Field(
        default=None, min_length=1, max_length=256, description="Requests share cached prefixes only with their salt."
    )
    user: str | None = Field(default=None, max_length=512, description="Has no effect.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in _UNSUPPORTED.keys() & data.keys():
            raise_unsupported(name)
        return data

    @model_validator(mode="after")
    def _streams(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "it is for streams only; set stream: true")
        return self


def raise_unsupported(name: str) -> None:
    raise FieldError(name, _UNSUPPORTED[name])


#: `max_tokens` of a completion that does not state it, as in OpenAI's API. A chat goes to the end of the context.
DEFAULT_COMPLETION_TOKENS = 16


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                _implies("stream_options", {"type": "object"}, stream=True),
                _implies("max_tokens", {"const": 0}, echo=True),
            ]
        }
    )

    prompt: Prompt
    max_tokens: Natural | None = Field(
        default=DEFAULT_COMPLETION_TOKENS,
        description="0: the prompt alone, with echo; null: to the end of the context.",
    )
    echo: bool = Field(default=False, description="Begin the text, and its log-probabilities, with the prompt.")
    logprobs: Alternatives | None = None
    return_tokens_as_token_ids: bool = Field(
        default=False, description="Log-probabilities name tokens as token_id:N, so that equal texts are no problem."
    )
    add_special_tokens: bool = Field(default=True, description="Begin the prompt as the tokenizer begins a text.")

    @model_validator(mode="after")
    def _has_output(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "expected at least 1; 0 is for the prompt alone, with echo: true")
        return self

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return list(self.prompt)


class TextPart(_Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


Content = Annotated[
    str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)],
    _one_of(f'a string, or 1 to {MAX_PARTS} parts {{"type": "text", "text": ...}}; only text is supported'),
    Unicode,
]


class Message(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = Field(default=None, max_length=256)

    def for_template(self) -> dict[str, str]:
        """Return the message for a chat template: its parts joined, and OpenAI's newer role `developer` as `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"name": self.name} if self.name else {})


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


# Others are refused: `tokenize`, `chat_template` and the like are arguments of the rendering function.
class TemplateOptions(_Strict):
    """The variables of chat templates that a request may set: those that turn thinking on, off or down."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Literal["low", "medium", "high"] | None = None


class ChatCompletionRequest(SamplingRequest):
    """``POST /v1/chat/completions``."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                _implies("stream_options", {"type": "object"}, stream=True),
                _implies("top_logprobs", {"type": "integer"}, logprobs=True),
            ]
        }
    )

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Alternatives | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["low", "medium", "high"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "it needs logprobs: true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise FieldError("max_completion_tokens", "it differs from max_tokens; give one of them")
        if self.max_tokens is None:
            self.max_tokens = self.max_completion_tokens
        return self

    def template_options(self) -> dict[str, bool | str]:
        variables = {} if self.chat_template_kwargs is None else self.chat_template_kwargs.model_dump(exclude_none=True)
        return variables | ({} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort})


class TokenizeRequest(_Strict):
    """``POST /tokenize``: a prompt, or messages through the chat template."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
            ]
        }
    )

    model: str | None = Field(default=None, max_length=512)
    prompt: Annotated[str, Unicode] | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "expected either prompt or messages")
        return self


class DetokenizeRequest(_Strict):
    """``POST /detokenize``."""

    model: str | None = Field(default=None, max_length=512)
    tokens: Annotated[list[Token], Field(max_length=MAX_TOKENS, fail_fast=True), WrapValidator(_whole)]


def _check_size(schema: Any) -> None:
    """Refuse a schema that is too large or too deep to be compiled into a grammar, or is not Unicode."""
    nodes, level = 0, [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        nodes += len(level)
        if not level:
            return
        if nodes > MAX_SCHEMA_NODES:
            raise ValueError(f"the schema has more than {MAX_SCHEMA_NODES} values")
        for node in level:
            _is_unicode(list(node) if isinstance(node, dict) else node)
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    raise ValueError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
