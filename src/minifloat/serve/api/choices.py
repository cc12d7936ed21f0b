"""What completions and chats of OpenAI's API have in common: fields of requests, and answers that are lists of choices.

Fields that vLLM adds have vLLM's names.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WrapValidator, model_validator

from minifloat._version import __version__
from minifloat.engine import Grammar, TokenUsage
from minifloat.engine.sampling import MAX_STOPS
from minifloat.errors import UsageError
from minifloat.serve.api.answers import CollectedAnswer, Piece, Writer
from minifloat.serve.api.fields import (
    BadWords,
    Choices,
    Count,
    Json,
    JsonObjectFormat,
    JsonSchemaFormat,
    LogitBias,
    Natural,
    Priority,
    Seed,
    Stop,
    Strict,
    TextFormat,
    Token,
    TopK,
    Unicode,
    whole,
)
from minifloat.serve.api.items import Text
from minifloat.serve.api.sampling import Sampling
from minifloat.serve.server.errors import FieldError

#: Fields of OpenAI's API that are not supported -> message.
_UNSUPPORTED = {
    "functions": "OpenAI has replaced it by tools",
    "function_call": "OpenAI has replaced it by tool_choice",
    "best_of": "best_of is not supported; ask for n answers and choose among them",
    "suffix": "insertion is not supported by this server",
    "audio": "only text is supported by this server",
    "modalities": "only text is supported by this server",
    "chat_template": "a template in a request is refused; start the server with --chat-template",
}


class Structure(Strict):
    """What stands in a text where it begins: JSON of a schema, and what ends it."""

    begin: Annotated[str, Field(min_length=1, max_length=256)]
    schema_: Json = Field(alias="schema")
    end: Annotated[str, Field(max_length=256)] = ""


class StructuralTagFormat(Strict):
    """Format of the answer: free text in which a trigger goes on as a structure, as in vLLM."""

    type: Literal["structural_tag"]
    structures: Annotated[list[Structure], Field(min_length=1, max_length=128)]
    triggers: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(min_length=1, max_length=128)]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


#: Kinds of rules by vLLM's names.
_RULES: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
    "json_object": lambda _: Grammar.json_object(),
}
Schema = Json | Text
Texts = Annotated[list[str], Field(max_length=1024), Unicode]


class StructuredOutputs(Strict):
    """Rules that the answer follows, as vLLM names them; one of them."""

    json_: Schema | None = Field(default=None, alias="json", description="JSON schema.")
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = Field(default=None, description="Lark of llguidance, or GBNF.")
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _has_one(self) -> StructuredOutputs:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError(f"expected one of {', '.join(_RULES)}")
        return self


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = Field(default=False, description="End with a chunk that has the usage and no choices.")


class SamplingRequest(Strict):
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
    stop_token_ids: Annotated[list[Token], WrapValidator(whole)] = Field(default=[], max_length=MAX_STOPS)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logit_bias: LogitBias | None = None
    bad_words: BadWords = Field(default=[], description="Texts that no answer has.")
    priority: Priority = Field(default=0, description="Of the requests that wait, those of the lowest are next.")
    return_token_ids: bool = Field(default=False, description="Return the tokens of prompts and answers.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(default=None, description="Rules of other kinds.")
    guided_json: Schema | None = Field(default=None, description="An older name of structured_outputs.json.")
    guided_regex: Text | None = Field(default=None, description="An older name of structured_outputs.regex.")
    guided_choice: Texts | None = Field(default=None, description="An older name of structured_outputs.choice.")
    guided_grammar: Text | None = Field(default=None, description="An older name of structured_outputs.grammar.")
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
            raise FieldError(name, _UNSUPPORTED[name])
        return data

    @model_validator(mode="after")
    def _streams(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "it is for streams only; set stream: true")
        return self

    def grammar(self) -> Grammar | None:
        """Return the rules of the answer.

        Raises:
            UsageError: If they cannot be used; the message begins with the field's name.
        """
        guided = {f"guided_{kind}": (kind, getattr(self, f"guided_{kind}", None)) for kind in _RULES}
        found: dict[str, tuple[str, Any]] = {name: rules for name, rules in guided.items() if rules[1] is not None}
        if self.structured_outputs is not None:
            (found["structured_outputs"],) = self.structured_outputs.model_dump(
                by_alias=True, exclude_none=True
            ).items()
        if self.response_format is not None and not isinstance(self.response_format, TextFormat):
            found["response_format"] = ("", self.response_format)
        if not found:
            return None
        (name, (kind, rules)), *others = found.items()
        if others:
            raise UsageError(f"{name}: {others[0][0]} states rules too; give one of them")
        try:
            return replace(_RULES[kind](rules) if kind else _grammar_of(rules), field=name)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error

    def _sampling(self, **others: Any) -> Sampling:
        """Return the internal form of the fields here, and of those that differ."""
        stop = self.stop or []
        return Sampling(
            **{name: getattr(self, name) for name in _SAME},
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop=self.include_stop_str_in_output,
            returns_ids=self.return_token_ids,
            bad_words=tuple(self.bad_words),
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            cache_salt=self.cache_salt or "",
            **others,
        )

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _grammar_of(format: JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat) -> Grammar:
    match format:
        case JsonSchemaFormat():
            return Grammar.json_schema(format.json_schema.schema_)
        case StructuralTagFormat():
            structures = [(each.begin, each.schema_, each.end) for each in format.structures]
            return Grammar.structural_tag(format.triggers, structures)
    return Grammar.json_object()


#: Fields of requests that the internal form has as they are.
_SAME = {each.name for each in fields(Sampling)} & SamplingRequest.model_fields.keys() - {
    *("stop", "stop_token_ids", "bad_words", "logit_bias", "cache_salt")
}


class PromptTokensDetails(BaseModel):
    """Number of tokens of the prompt that came from the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Numbers of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, usage: TokenUsage) -> Usage:
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        )


class AnswerBody(BaseModel):
    """The fields that all answers begin with, in this order."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


FINGERPRINT = f"minifloat-{__version__}"
#: Log-probability of an impossible token, since JSON has no infinity.
_IMPOSSIBLE = -9999.0


def finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)


class ChoiceWriter(Writer):
    """Writes one kind of answer; `answer_type` and `chunk_type` are its bodies with their `object`."""

    prefix: str
    answer_type: tuple[type[BaseModel], str]
    chunk_type: tuple[type[BaseModel], str]

    def __init__(self, model: str, *, logprobs: bool, with_usage: bool, with_ids: bool = False) -> None:
        super().__init__()
        self._logprobs, self._with_usage, self._with_ids = logprobs, with_usage, with_ids
        self._fields = {
            "id": f"{self.prefix}-{self.name}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    @abstractmethod
    def _news(self, index: int, piece: Piece, ending: dict[str, Any]) -> Iterable[BaseModel]:
        """Return the choices of the chunks of a piece."""

    @abstractmethod
    def _whole(self, index: int, answer: CollectedAnswer, ending: dict[str, Any]) -> BaseModel:
        """Return the choice of a whole answer."""

    def piece(self, index: int, piece: Piece) -> list[BaseModel]:
        delivery = piece.delivery
        tokens = delivery.tokens if self._with_ids else ()
        if not (piece.events or delivery.logprobs or delivery.prompt_logprobs or piece.finish_reason or tokens):
            return []
        ending = {"finish_reason": piece.finish_reason, "stop_reason": delivery.stop_reason} | self._ids(tokens)
        return [self._chunk(choice) for choice in self._news(index, piece, ending)]

    def closing(self, usage: TokenUsage) -> list[BaseModel]:
        """Return the chunk with the usage, which has no text, if the request wants it."""
        body, kind = self.chunk_type
        last = body(object=kind, choices=[], **self._fields, usage=self._usage(usage))
        return [last] if self._with_usage else []

    def answer(self, answers: Sequence[CollectedAnswer], usage: TokenUsage) -> BaseModel:
        body, kind = self.answer_type
        bodies = [
            self._whole(
                index,
                answer,
                {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason} | self._ids(answer.tokens),
            )
            for index, answer in enumerate(answers)
        ]
        return body(object=kind, choices=bodies, usage=self._usage(usage), **self._fields)

    def _usage(self, usage: TokenUsage) -> Usage:
        return Usage.of(usage)

    def _ids(self, tokens: Iterable[int]) -> dict[str, Any]:
        """Return the field of a choice with its tokens, if the request wants them."""
        return {"token_ids": list(tokens)} if self._with_ids else {}

    def _chunk(self, choice: BaseModel, **others: Any) -> BaseModel:
        body, kind = self.chunk_type
        usage = {"usage": None} if self._with_usage else {}
        return body(object=kind, choices=[choice], **self._fields, **usage, **others)
