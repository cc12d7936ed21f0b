"""``/v1/responses``: OpenAI's newer API. It is stateless: a request has the whole conversation."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, Tag, model_validator
from starlette.responses import Response

from minifloat.engine import Grammar, TokenLogprob, TokenUsage
from minifloat.errors import UsageError
from minifloat.serve.api.answers import AnswerPart, CollectedAnswer
from minifloat.serve.api.chat import chat_logprobs
from minifloat.serve.api.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    Alternatives,
    Count,
    Json,
    JsonObjectFormat,
    Strict,
    TextFormat,
)
from minifloat.serve.api.items import (
    EFFORTS,
    MAX_TOOLS,
    CallId,
    Effort,
    Ignored,
    PartWriter,
    StreamEvent,
    Text,
    ToolName,
    check_tools,
    joined,
    kind,
    read_arguments,
    text_or_list,
    written_arguments,
)
from minifloat.serve.api.respond import respond_to
from minifloat.serve.api.sampling import Sampling
from minifloat.serve.dialog.conversation import Conversation, Thinking, Tool, ToolChoice
from minifloat.serve.dialog.history import History, UnknownCall
from minifloat.serve.server.errors import APIError, FieldError
from minifloat.serve.server.openapi import streamed_events
from minifloat.serve.server.service import BoundedRoute, require_json, service_of

_LOGPROBS = "message.output_text.logprobs"
#: A conversation has several items for each message of a chat.
MAX_ITEMS = 4 * MAX_MESSAGES
#: What the thinking in `encrypted_content` begins with. It is text in base64, and no secret.
_THINKING = "minifloat:"
_TEXT_ONLY = "this server reads text only"
_NOT_STORED = "this server stores nothing; send the items themselves"
_OWN_TOOLS = "it belongs to OpenAI's servers; this server has tools of the types function, custom and namespace"
_REFUSED_PARTS = dict.fromkeys(("input_image", "input_file", "input_audio"), _TEXT_ONLY)
_REFUSED_ITEMS = dict.fromkeys(("item_reference", "compaction"), _NOT_STORED) | dict.fromkeys(
    (
        *("additional_tools", "apply_patch_call", "code_interpreter_call", "computer_call", "file_search_call"),
        *(
            "image_generation_call",
            "local_shell_call",
            "mcp_",
            "program",
            "shell_call",
            "tool_search",
            "web_search_call",
        ),
    ),
    _OWN_TOOLS,
)


class InputPart(Strict):
    """A piece of a message or of a result."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None
    prompt_cache_breakpoint: Ignored = None


Parts = Annotated[
    list[Annotated[InputPart, kind("input_text", "output_text", refused=_REFUSED_PARTS)]],
    Field(max_length=MAX_PARTS),
    Tag("list"),
]
TextOrParts = Annotated[Annotated[Text, Tag("str")] | Parts, text_or_list]


class _Item(Strict):
    """The fields of every item that have no effect."""

    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None


class InputMessage(_Item):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts
    phase: Ignored = None

    def add_to(self, history: History) -> None:
        add = {"user": history.user, "assistant": history.say}.get(self.role, history.system)
        add(joined(self.content))


class ReasoningPart(Strict):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(_Item):
    """What the model thought in an earlier turn: the content counts, else the encrypted content, else the summary."""

    type: Literal["reasoning"]
    summary: list[ReasoningPart] = Field(default=[], max_length=MAX_PARTS)
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: Text | None = None

    def add_to(self, history: History) -> None:
        texts = [part.text for part in self.content or ()] or _decoded(self.encrypted_content)
        for text in texts or [part.text for part in self.summary]:
            history.think(text)


def _encoded(thinking: str) -> str:
    return _THINKING + base64.b64encode(thinking.encode()).decode()


def _decoded(content: str | None) -> list[str]:
    """Return the thinking that this server wrote, or nothing if another one wrote it."""
    if content is None or not content.startswith(_THINKING):
        return []
    try:
        return [base64.b64decode(content.removeprefix(_THINKING), validate=True).decode()]
    except ValueError:
        return []


class FunctionCall(_Item):
    """A call of a function in an earlier turn."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    namespace: ToolName | None = None
    arguments: Text
    parsed_arguments: Ignored = None

    def add_to(self, history: History) -> None:
        try:
            arguments = read_arguments(self.arguments)
        except ValueError as error:
            raise UsageError(f"arguments: {error}") from error
        history.call(self.call_id, inner_name(self.name, self.namespace), arguments)


class CustomCall(_Item):
    """A call of a custom tool in an earlier turn."""

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: ToolName
    namespace: ToolName | None = None
    input: Text

    def add_to(self, history: History) -> None:
        history.call(self.call_id, inner_name(self.name, self.namespace), {_INPUT: self.input})


class CallOutput(_Item):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: TextOrParts
    name: Ignored = None
    namespace: Ignored = None

    def add_to(self, history: History) -> None:
        history.result(self.call_id, joined(self.output))


Item = Annotated[
    InputMessage | ReasoningItem | FunctionCall | CustomCall | CallOutput,
    Field(discriminator="type"),
    kind(
        *("message", "reasoning", "function_call", "function_call_output"),
        *("custom_tool_call", "custom_tool_call_output"),
        refused=_REFUSED_ITEMS,
        default="message",
    ),
]

#: The only argument of a custom tool, as the model sees it.
_INPUT = "input"


def inner_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool."""
    return name if namespace in (None, "functions") else f"{namespace.removesuffix('__')}__{name}"


@dataclass(frozen=True)
class OfferedTool:
    """A tool that the model may call, and how the API names it."""

    tool: Tool
    name: str
    namespace: str | None = None
    is_custom: bool = False


class FlatFunction(Strict):
    """A function that the client runs."""

    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: Json | None = None
    strict: bool | None = Field(default=None, description="Arguments that violate the schema are impossible.")
    allowed_callers: Ignored = None
    async_: Ignored = Field(default=None, alias="async")
    defer_loading: Ignored = None
    output_schema: Ignored = None

    def offered(self, namespace: str | None = None) -> list[OfferedTool]:
        schema = self.parameters or {"type": "object", "properties": {}}
        tool = Tool(inner_name(self.name, namespace), self.description or "", schema, bool(self.strict))
        return [OfferedTool(tool, self.name, namespace)]


class FreeformTool(Strict):
    """A tool whose input is a text. The model sees a function with one string."""

    type: Literal["custom"]
    name: ToolName
    description: Text | None = None
    format: Json | None = Field(default=None, description="A grammar is told to the model and not enforced.")
    allowed_callers: Ignored = None
    async_: Ignored = Field(default=None, alias="async")
    defer_loading: Ignored = None

    def offered(self, namespace: str | None = None) -> list[OfferedTool]:
        definition = (self.format or {}).get("definition")
        grammar = f"\n\nThe input follows this grammar:\n{definition}" if isinstance(definition, str) else ""
        schema = {
            "type": "object",
            "properties": {_INPUT: {"type": "string"}},
            "required": [_INPUT],
            "additionalProperties": False,
        }
        tool = Tool(inner_name(self.name, namespace), (self.description or "") + grammar, schema)
        return [OfferedTool(tool, self.name, namespace, is_custom=True)]


class NamespaceTool(Strict):
    """Tools whose names share a namespace."""

    type: Literal["namespace"]
    name: ToolName
    description: Ignored = None
    tools: list[Annotated[FlatFunction | FreeformTool, Field(discriminator="type")]] = Field(max_length=MAX_TOOLS)

    def offered(self) -> list[OfferedTool]:
        return [offered for tool in self.tools for offered in tool.offered(self.name)]


BuiltIn = Literal[
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
]


class BuiltInTool(BaseModel):
    """A tool of OpenAI's servers. It is left out beside other tools, and refused alone."""

    model_config = ConfigDict(extra="allow")

    type: BuiltIn

    def offered(self) -> list[OfferedTool]:
        return []


AnyTool = Annotated[
    FlatFunction | FreeformTool | NamespaceTool | BuiltInTool,
    Field(discriminator="type"),
    kind("function", "custom", "namespace", *get_args(BuiltIn), refused={}),
]


class NamedChoice(Strict):
    """One tool that the answer calls."""

    type: Literal["function", "custom"]
    name: ToolName
    namespace: ToolName | None = None


class SomeTools(Strict):
    """Some of the tools, which the answer may call, or calls."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Annotated[NamedChoice, kind("function", "custom", refused={})]] = Field(
        min_length=1, max_length=MAX_TOOLS
    )


AnyChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")]
    | Annotated[
        NamedChoice | SomeTools,
        Field(discriminator="type"),
        kind("function", "custom", "allowed_tools", refused=dict.fromkeys(get_args(BuiltIn), _OWN_TOOLS)),
        Tag("list"),
    ],
    text_or_list,
]


class SchemaFormat(Strict):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(max_length=64)]
    schema_: Json = Field(alias="schema")
    description: Ignored = None
    strict: bool | None = Field(default=None, description="The schema is always followed strictly.")


AnyFormat = Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")]


class TextConfig(Strict):
    """What the text of the answer looks like."""

    format: AnyFormat = TextFormat(type="text")
    verbosity: Ignored = None

    def grammar(self) -> Grammar | None:
        if isinstance(self.format, SchemaFormat):
            return Grammar.json_schema(self.format.schema_)
        return Grammar.json_object() if isinstance(self.format, JsonObjectFormat) else None


class Reasoning(Strict):
    """How the model thinks before it answers. There are no summaries: the thinking itself is in the answer."""

    effort: Effort | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None
    mode: Ignored = None

    def thinking(self) -> Thinking:
        return Thinking(enabled=False if self.effort == "none" else None, effort=EFFORTS.get(self.effort or ""))


#: Fields that are refused unless they are null or false -> why.
_REFUSED_FIELDS = {
    "previous_response_id": "this server stores no responses; send the whole conversation as input",
    "conversation": "this server stores no conversations; send the whole conversation as input",
    "store": "this server stores no responses; leave store out, or send false",
    "background": "this server answers at once; leave background out, or send false",
    "prompt": "this server stores no prompts; send instructions and input",
    "moderation": "this server has no moderation",
}


class ResponsesRequest(Strict):
    """``POST /v1/responses``."""

    model: str = Field(max_length=512, description="The served model's name, as /v1/models gives it.")
    input: Annotated[
        Annotated[Text, Tag("str")] | Annotated[list[Item], Field(max_length=MAX_ITEMS), Tag("list")], text_or_list
    ]
    instructions: Text | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnyChoice = "auto"
    parallel_tool_calls: bool | None = None
    text: TextConfig = TextConfig()
    reasoning: Reasoning | None = None
    max_output_tokens: Count | None = Field(default=None, description="At most as many as the context has room for.")
    temperature: float | None = Field(default=None, ge=0, le=100, description="0: the most probable token.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    metadata: (
        Annotated[
            dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    include: (
        list[
            Literal[
                "reasoning.encrypted_content",
                "message.output_text.logprobs",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ]
        | None
    ) = Field(default=None, max_length=16)
    stream: bool | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    moderation: None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    top_logprobs: Alternatives | None = Field(
        default=None, description="Alternatives of each token; it asks for log-probabilities, as include does."
    )
    truncation: Ignored = None
    max_tool_calls: Ignored = None
    client_metadata: Ignored = None
    context_management: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    stream_options: Ignored = None
    user: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_needs_memory(cls, data: Any) -> Any:
        for name, reason in _REFUSED_FIELDS.items():
            if isinstance(data, dict) and data.get(name):
                raise FieldError(name, reason)
        return data

    def offered(self) -> list[OfferedTool]:
        """Return the tools that the model may call."""
        tools = [offered for tool in self.tools or () for offered in tool.offered()]
        if self.tools and not tools:
            raise UsageError(f"tools: {self.tools[0].type} is not supported: {_OWN_TOOLS}")
        return tools

    def conversation_with(self, offered: Sequence[OfferedTool]) -> Conversation:
        """Return the conversation, with tools from `offered`."""
        tools, choice = tuple(each.tool for each in offered), self._choice()
        check_tools(tools, choice)
        return Conversation(
            self._messages(),
            tools=tools,
            choice=choice,
            parallel=self.parallel_tool_calls is not False,
            thinking=Thinking() if self.reasoning is None else self.reasoning.thinking(),
            grammar=self.text.grammar(),
        )

    def _messages(self) -> list[dict[str, Any]]:
        history = History()
        history.system(self.instructions or "")
        if isinstance(self.input, str):
            history.user(self.input)
            return history.messages()
        for number, item in enumerate(self.input):
            try:
                item.add_to(history)
            except (UnknownCall, UsageError) as error:
                raise UsageError(f"input[{number}]: {error}") from error
        messages = history.messages()
        if not messages:
            raise UsageError("input: it says nothing")
        return messages

    def _choice(self) -> ToolChoice:
        match self.tool_choice:
            case NamedChoice() as one:
                return ToolChoice("required", (inner_name(one.name, one.namespace),))
            case SomeTools(mode=mode, tools=some):
                return ToolChoice(mode, tuple(inner_name(tool.name, tool.namespace) for tool in some))
            case mode:
                return ToolChoice(mode)

    def sampling(self) -> Sampling:
        wanted = self.top_logprobs or _LOGPROBS in (self.include or ())
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_output_tokens,
            must_fit=False,
            logprobs=(self.top_logprobs or 0) if wanted else None,
        )


class InputDetails(BaseModel):
    """Tokens of the prompt that came from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    """Tokens of the answer that are thinking."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: TokenUsage) -> ResponseUsage:
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=usage.cached_tokens, cache_write_tokens=0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=usage.thinking_tokens),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )


class ResponseBody(BaseModel):
    """Answer of ``/v1/responses``."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    instructions: str | None
    metadata: dict[str, str]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_logprobs: int
    truncation: Literal["disabled"]
    previous_response_id: None
    store: Literal[False]
    background: Literal[False]


Status = Literal["in_progress", "completed", "incomplete"]


class ResponseWriter(PartWriter):
    """Writes answers of ``/v1/responses``.

    Args:
        model: Name of the model.
        body: The request.
        offered: Its tools.
    """

    scores_text = True

    def __init__(self, model: str, body: ResponsesRequest, offered: Sequence[OfferedTool]) -> None:
        super().__init__()
        self._model, self._offered = model, {each.tool.name: each for each in offered}
        self._created, self._sequence = int(time.time()), 0
        self._encrypted = "reasoning.encrypted_content" in (body.include or ())
        self._echo = _echo(body)

    def answer(self, answers: Sequence[CollectedAnswer], usage: TokenUsage) -> ResponseBody:
        return self._ended(answers[0], usage)

    def _ended(self, answer: CollectedAnswer, usage: TokenUsage) -> ResponseBody:
        is_cut = answer.finish_reason == "length"
        output = [
            self._item(index, self._named(part), _status(part, is_cut and part is answer.parts[-1]))
            for index, part in enumerate(answer.parts)
        ]
        details = {"reason": "max_output_tokens"} if is_cut else None
        status: Literal["incomplete", "completed"] = "incomplete" if is_cut else "completed"
        return self._response(status, output, usage=ResponseUsage.of(usage), incomplete_details=details)

    def _response(
        self,
        status: Literal["in_progress", "completed", "incomplete", "failed"],
        output: list[dict[str, Any]],
        *,
        usage: ResponseUsage | None = None,
        incomplete_details: dict[str, str] | None = None,
        error: dict[str, str] | None = None,
    ) -> ResponseBody:
        return ResponseBody(
            id=f"resp_{self.name}",
            object="response",
            created_at=self._created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=error,
            incomplete_details=incomplete_details,
            model=self._model,
            output=output,
            usage=usage,
            **self._echo,
        )

    def _item(self, index: int, part: AnswerPart, status: Status) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(index, part), "status": status}
        if part.kind == "text":
            return item | {"type": "message", "role": "assistant", "content": [_text(part)] if part.pieces else []}
        if part.kind == "thinking":
            content = [{"type": "reasoning_text", "text": part.text}] if part.pieces else []
            hidden = {"encrypted_content": _encoded(part.text)} if self._encrypted and part.pieces else {}
            return item | {"type": "reasoning", "summary": [], "content": content} | hidden
        offered = self._offered[part.name]
        item |= {"call_id": part.id, "name": offered.name}
        if offered.namespace is not None:
            item["namespace"] = offered.namespace
        if offered.is_custom:
            return item | {"type": "custom_tool_call", "input": _custom_input(part)}
        return item | {"type": "function_call", "arguments": part.text}

    def _id(self, index: int, part: AnswerPart) -> str:
        return f"{_PREFIXES[part.kind]}_{self.name}{index}"

    def _is_custom(self, part: AnswerPart) -> bool:
        return part.kind == "call" and self._offered[part.name].is_custom

    def _event(self, type: str, **fields: Any) -> StreamEvent:
        event = StreamEvent.of(f"response.{type}", sequence_number=self._sequence, **fields)
        self._sequence += 1
        return event

    def opening(self) -> Iterable[StreamEvent]:
        begun = self._response("in_progress", [])
        return [self._event("created", response=begun), self._event("in_progress", response=begun)]

    def _begin(self, index: int, part: AnswerPart) -> Iterable[StreamEvent]:
        yield self._event("output_item.added", output_index=index, item=self._item(index, part, "in_progress"))
        if part.kind != "call":
            yield self._event("content_part.added", **self._place(index, part), part=_content(part))

    def _more(self, index: int, part: AnswerPart, text: str, logprobs: Sequence[TokenLogprob]) -> Iterable[StreamEvent]:
        if not self._is_custom(part):
            scores = _logprobs(part, logprobs)
            yield self._event(f"{_TEXTS[part.kind]}.delta", **self._place(index, part), delta=text, **scores)

    def _finish(self, index: int, part: AnswerPart) -> Iterable[StreamEvent]:
        place, name = self._place(index, part), _TEXTS[part.kind]
        if self._is_custom(part):
            text = _custom_input(part)
            yield self._event("custom_tool_call_input.delta", **place, delta=text)
            yield self._event("custom_tool_call_input.done", **place, input=text)
        elif part.kind == "call":
            yield self._event(f"{name}.done", **place, arguments=part.text)
        else:
            yield self._event(f"{name}.done", **place, text=part.text, **_logprobs(part, part.logprobs))
            yield self._event("content_part.done", **place, part=_content(part))
        status = _status(part, self._streamed.finish_reason == "length")
        yield self._event("output_item.done", output_index=index, item=self._item(index, part, status))

    def _place(self, index: int, part: AnswerPart) -> dict[str, Any]:
        content = {} if part.kind == "call" else {"content_index": 0}
        return {"item_id": self._id(index, part), "output_index": index, **content}

    def _ending(self, usage: TokenUsage) -> Iterable[StreamEvent]:
        response = self._ended(self._streamed, usage)
        return [self._event(response.status, response=response)]

    def failure(self, error: APIError) -> bytes:
        output = [self._item(index, part, _status(part, True)) for index, part in enumerate(self._streamed.parts)]
        code = "server_error" if error.status_code >= 500 else "invalid_prompt"
        response = self._response("failed", output, error={"code": code, "message": error.detail})
        return self.encode(self._event("failed", response=response))


_PREFIXES = {"text": "msg", "thinking": "rs", "call": "fc"}
#: Names of the events with new text.
_TEXTS = {"text": "output_text", "thinking": "reasoning_text", "call": "function_call_arguments"}


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of an answer that repeat the request, with the tools that the model may call."""
    tools = [tool for tool in body.tools or () if not isinstance(tool, BuiltInTool)]
    effort = None if body.reasoning is None else body.reasoning.effort
    return {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "tools": [tool.model_dump(by_alias=True, exclude_unset=True) for tool in tools],
        "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": body.text.format.model_dump(by_alias=True, exclude_unset=True)},
        "reasoning": {"effort": effort, "summary": None},
        "max_output_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "previous_response_id": None,
        "store": False,
        "background": False,
    }


def _status(part: AnswerPart, is_cut: bool) -> Literal["completed", "incomplete"]:
    if part.kind == "call":
        return "completed" if part.complete else "incomplete"
    return "incomplete" if is_cut else "completed"


def _text(part: AnswerPart) -> dict[str, Any]:
    return {"type": "output_text", "text": part.text, "annotations": [], **_logprobs(part, part.logprobs)}


def _content(part: AnswerPart) -> dict[str, Any]:
    return _text(part) if part.kind == "text" else {"type": "reasoning_text", "text": part.text}


def _logprobs(part: AnswerPart, logprobs: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
    """Return a field that texts and their events must have; empty without log-probabilities."""
    return {"logprobs": chat_logprobs(logprobs).model_dump()["content"]} if part.kind == "text" else {}


def _custom_input(part: AnswerPart) -> str:
    text = written_arguments(part, "trailing-strings").get(_INPUT, "")
    return text if isinstance(text, str) else ""


router = APIRouter(route_class=BoundedRoute, tags=["OpenAI"], dependencies=[Depends(require_json)])


@router.post("/v1/responses", response_model=None, responses=streamed_events(ResponseBody))
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation of items."""
    service = service_of(request)
    service.check_model(body.model, "generate")
    offered = body.offered()
    writer = ResponseWriter(service.settings.model_name, body, offered)
    conversation = await service.prompts.run_in_thread(body.conversation_with, offered)  # arguments are parsed
    return await respond_to(
        conversation,
        body.sampling(),
        writer,
        service=service,
        caller=request,
        stream=bool(body.stream),
    )
