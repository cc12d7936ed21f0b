"""``/v1/chat/completions``: its requests, their translation, its answers and its route."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from minifloat.engine import TokenLogprob, TokenUsage
from minifloat.serve.api.answers import CollectedAnswer, FinishReason, Piece
from minifloat.serve.api.choices import AnswerBody, ChoiceWriter, SamplingRequest, Usage, finite
from minifloat.serve.api.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    Alternatives,
    Count,
    Json,
    Natural,
    Strict,
    Unicode,
    check_size,
    implies,
    one_of,
)
from minifloat.serve.api.items import (
    EFFORTS,
    MAX_TOOLS,
    CallId,
    Effort,
    Text,
    ToolName,
    check_tools,
    kind,
    read_arguments,
)
from minifloat.serve.api.respond import respond_to
from minifloat.serve.api.sampling import Sampling
from minifloat.serve.dialog.conversation import Conversation, Thinking, Tool, ToolChoice
from minifloat.serve.dialog.events import AnswerText, CallArguments, CallBegins, Event, ThinkingText
from minifloat.serve.server.errors import FieldError, invalid
from minifloat.serve.server.openapi import streamed
from minifloat.serve.server.service import BoundedRoute, require_json, service_of

MAX_CALLS = 128
MAX_DOCUMENTS = 64
MAX_VARIABLES = 64


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


Content = Annotated[
    str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)],
    one_of(f'a string, or 1 to {MAX_PARTS} parts {{"type": "text", "text": ...}}; only text is supported'),
    Unicode,
]


class CalledFunction(Strict):
    """The function of a call, and its arguments as JSON text."""

    name: ToolName
    arguments: Text


class ToolCall(Strict):
    """A call in an assistant's message."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        try:
            arguments = read_arguments(self.function.arguments)
        except ValueError as error:
            raise invalid(f"messages: the arguments of the call {self.id!r}: {error}", "messages") from error
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, Unicode] | None = Field(default=None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: Text | None = Field(default=None, description="What an assistant thought.")
    reasoning: Text | None = Field(default=None, description="The same.")
    refusal: str | None = Field(default=None, max_length=65536, description="Has no effect.")
    annotations: Annotated[list[Any], Field(max_length=MAX_PARTS)] | None = Field(
        default=None, description="Has no effect."
    )
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_the_fields_of_its_role(self) -> Message:
        assistant, tool = self.role == "assistant", self.role == "tool"
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(self, name) and not assistant:
                raise ValueError(f"a message of the role {self.role} has no {name}")
        if tool != (self.tool_call_id is not None):
            raise ValueError("tool_call_id: a message of the role tool needs it, and no other has it")
        if self.content is None and not (assistant and (self.tool_calls or self.reasoning_content or self.reasoning)):
            raise ValueError("content: only a message with tool_calls needs none")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message for a chat template: its parts joined, and OpenAI's newer role `developer` as `system`."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        others = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()],
        }
        return {"role": role, "content": text} | {name: value for name, value in others.items() if value}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class FunctionTool(Strict):
    """A function that the model may call."""

    name: ToolName
    description: Text | None = None
    parameters: Json | None = None
    strict: bool | None = Field(default=None, description="Arguments that violate the schema are impossible.")


class ChatTool(Strict):
    """A tool."""

    type: Literal["function"]
    function: FunctionTool

    def tool(self) -> Tool:
        found = self.function
        schema = {"type": "object", "properties": {}} | (found.parameters or {})
        return Tool(found.name, found.description or "", schema, bool(found.strict))


def _are_small(values: list[Any]) -> list[Any]:
    """Refuse schemas, or documents, that are too large together."""
    check_size([value.function.parameters if isinstance(value, ChatTool) else value for value in values])
    return values


Tools = Annotated[
    list[Annotated[ChatTool, kind("function", refused={"custom": "describe the tool as a function"})]],
    Field(max_length=MAX_TOOLS),
    AfterValidator(_are_small),
]


class FunctionName(Strict):
    """The name of a function."""

    name: ToolName


class NamedTool(Strict):
    """A tool by its name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    """Tools that the answer may call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Strict):
    """A choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Choice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedChoice,
    one_of("none, auto, required, or an object of the type function or allowed_tools"),
]


def tool_choice(choice: str | NamedTool | AllowedChoice | None) -> ToolChoice:
    match choice:
        case NamedTool():
            return ToolChoice("required", (choice.function.name,))
        case AllowedChoice():
            allowed = choice.allowed_tools
            return ToolChoice(allowed.mode, tuple(each.function.name for each in allowed.tools))
        case "none" | "required":
            return ToolChoice(choice)
    return ToolChoice()


#: Arguments of the functions that render and tokenize chats, here or in transformers, and variables that are fields of
#: their own; names of special tokens end with `_token` or `_tokens`.
_NO_VARIABLES = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"),
        *("max_characters", "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "sanitize_control_tokens", "tokenize", "tokenizer", "tokenizer_kwargs", "tools"),
        "truncation",
    )
)
_VARIABLE = re.compile("[a-zA-Z][a-zA-Z0-9_]{0,63}")


def _are_variables(variables: dict[str, Any]) -> dict[str, Any]:
    for name in variables:
        if not _VARIABLE.fullmatch(name):
            raise ValueError("expected names of 1 to 64 letters, digits and underscores, the first of them a letter")
        if name in _NO_VARIABLES or name.endswith(("_token", "_tokens")):
            raise FieldError(f"chat_template_kwargs.{name}", "it is no variable that a request may set")
    return check_size(variables)


class ChatFields(Strict):
    """What chat templates get beside the messages."""

    tools: Tools | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS), AfterValidator(_are_small)] | None = (
        Field(default=None, description="For chat templates that read them.")
    )
    chat_template_kwargs: (
        Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES), AfterValidator(_are_variables)] | None
    ) = Field(default=None, description="Variables of the chat template, such as enable_thinking.")
    add_generation_prompt: bool = Field(default=True, description="Whether an answer begins after the messages.")
    continue_final_message: bool = Field(
        default=False, description="Whether the answer continues the last message; add_generation_prompt is then false."
    )

    @model_validator(mode="after")
    def _opens_or_continues(self) -> ChatFields:
        asked = "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt
        if self.continue_final_message and asked:
            raise FieldError("continue_final_message", "it needs add_generation_prompt: false")
        return self

    def conversation_of(self, messages: list[Message], **others: Any) -> Conversation:
        last = messages[-1]
        if self.continue_final_message and (last.role != "assistant" or last.tool_calls):
            raise invalid("continue_final_message: the last message is no text of an assistant", "messages")
        names = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
        named = [
            message.model_copy(update={"name": names[message.tool_call_id]})
            if message.name is None and message.tool_call_id in names
            else message
            for message in messages
        ]
        return Conversation(
            [message.for_template() for message in named],
            tools=tuple(each.tool() for each in self.tools or ()),
            variables=self.chat_template_kwargs or {},
            documents=self.documents,
            continues=self.continue_final_message,
            opens=self.add_generation_prompt,
            **others,
        )


class ChatCompletionRequest(ChatFields, SamplingRequest):
    """``POST /v1/chat/completions``."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                implies("stream_options", {"type": "object"}, stream=True),
                implies("top_logprobs", {"type": "integer"}, logprobs=True),
            ]
        }
    )

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Alternatives | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = Field(default=True, description="Whether an answer may have several calls.")
    store: Literal[False] | None = Field(default=None, description="Has no effect: nothing is stored.")
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = Field(default=None, description="Has no effect.")
    service_tier: Literal["auto", "default"] | None = Field(default=None, description="Has no effect.")
    prompt_cache_key: str | None = Field(default=None, max_length=512, description="Has no effect.")
    safety_identifier: str | None = Field(default=None, max_length=512, description="Has no effect.")
    reasoning_effort: Effort | None = None
    max_reasoning_tokens: Natural | None = Field(
        default=None, description="Tokens of the thinking, after which it is ended."
    )
    include_reasoning: bool = Field(default=True, description="Whether the answer shows the thinking.")

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

    def conversation(self) -> Conversation:
        conversation = self.conversation_of(
            self.messages,
            choice=tool_choice(self.tool_choice),
            parallel=self.parallel_tool_calls,
            thinking=Thinking(
                enabled=False if self.reasoning_effort == "none" else None,
                effort=EFFORTS.get(self.reasoning_effort or ""),
                budget=self.max_reasoning_tokens,
            ),
            grammar=self.grammar(),
        )
        check_tools(conversation.tools, conversation.choice)
        return conversation

    def sampling(self) -> Sampling:
        return self._sampling(logprobs=(self.top_logprobs or 0) if self.logprobs else None)


ChatFinishReason = Literal["stop", "length", "tool_calls"]


class TopLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The chosen token and its most probable alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of ``/v1/chat/completions``."""

    content: list[ChatLogprob]


class FunctionCall(BaseModel):
    """The function that is called, and its arguments as JSON text."""

    name: str
    arguments: str


class AnswerCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    """The model's message; fields that are not set are left out."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnswerCall] | None = None


class ChatChoice(BaseModel):
    """One of the messages of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class CompletionTokensDetails(BaseModel):
    """Number of tokens of the answer that are thinking."""

    reasoning_tokens: int


class ChatUsage(Usage):
    """Numbers of tokens of a chat."""

    completion_tokens_details: CompletionTokensDetails


class ChatCompletion(AnswerBody):
    """Answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: ChatUsage
    prompt_token_ids: list[int] | None = None


class FunctionDelta(BaseModel):
    """The name of the function of a new call, or more of its arguments."""

    name: str | None = None
    arguments: str


class CallDelta(BaseModel):
    """A new call, or more of it."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(BaseModel):
    """The new part of a message; fields that are not set are left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """The new part of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(AnswerBody):
    """Chunk of a streamed answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: ChatUsage | None = None
    prompt_token_ids: list[int] | None = None


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Return the log-probabilities of new tokens for ``/v1/chat/completions``."""
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=token.text,
                logprob=finite(token.logprob),
                bytes=list(token.raw),
                top_logprobs=list(map(_top_logprob, token.top)),
            )
            for token in logprobs
        ]
    )


def _top_logprob(token: TokenLogprob) -> TopLogprob:
    return TopLogprob(token=token.text, logprob=finite(token.logprob), bytes=list(token.raw))


class ChatWriter(ChoiceWriter):
    """Writes answers of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    answer_type = (ChatCompletion, "chat.completion")
    chunk_type = (ChatChunk, "chat.completion.chunk")

    def __init__(self, *arguments: Any, choices: int, thinking: bool = True, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._choices, self._thinking = choices, thinking
        self._called: set[int] = set()

    def opening(self) -> list[BaseModel]:
        """Return a chunk with the role for each choice."""
        ending = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        role = Delta(role="assistant", content="")
        choices = [ChatChunkChoice(index=index, delta=role, **ending) for index in range(self._choices)]
        return [self._chunk(choice, **self._prompt_ids) for choice in choices]

    @property
    def _prompt_ids(self) -> dict[str, Any]:
        """The field of an answer with the tokens of the prompt, if the request wants them."""
        return {"prompt_token_ids": list(self.prompts[0])} if self._with_ids else {}

    def answer(self, answers: Sequence[CollectedAnswer], usage: TokenUsage) -> BaseModel:
        return super().answer(answers, usage).model_copy(update=self._prompt_ids)

    def _news(self, index: int, piece: Piece, ending: dict[str, Any]) -> list[BaseModel]:
        deltas = [delta for event in piece.events if (delta := self._delta(index, event)) is not None]
        if piece.finish_reason is not None and (not deltas or deltas[-1].content is None):
            deltas.append(Delta())
        elif not deltas and (piece.delivery.logprobs or ending.get("token_ids")):
            deltas.append(Delta(content=""))
        if not deltas:  # thinking that is not shown, or the end of a call
            return []
        logprobs = chat_logprobs(piece.delivery.logprobs or ()) if self._logprobs else None
        choices = [
            ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None, stop_reason=None)
            for delta in deltas
        ]
        choices[0].logprobs = logprobs
        choices[-1].finish_reason = _reason(piece.finish_reason, index in self._called)
        choices[-1].stop_reason = ending["stop_reason"]
        if self._with_ids:
            choices[-1].token_ids = ending["token_ids"]
        return list(choices)

    def _delta(self, index: int, event: Event) -> Delta | None:
        match event:
            case AnswerText(text):
                return Delta(content=text)
            case ThinkingText(text):
                return Delta(reasoning_content=text, reasoning=text) if self._thinking else None
            case CallBegins(number, id, name):
                self._called.add(index)
                function = FunctionDelta(name=name, arguments="")
                return Delta(tool_calls=[CallDelta(index=number, id=_call_id(id), type="function", function=function)])
            case CallArguments(number, text):
                return Delta(tool_calls=[CallDelta(index=number, function=FunctionDelta(arguments=text))])
        return None

    def _whole(self, index: int, answer: CollectedAnswer, ending: dict[str, Any]) -> BaseModel:
        calls = [
            AnswerCall(
                id=_call_id(call.id), type="function", function=FunctionCall(name=call.name, arguments=call.text)
            )
            for call in answer.calls
        ]
        message = AssistantMessage(role="assistant", content=answer.text or (None if calls else ""), refusal=None)
        if calls:
            message.tool_calls = calls
        if answer.thinking and self._thinking:
            message.reasoning_content = message.reasoning = answer.thinking
        logprobs = chat_logprobs(answer.logprobs) if self._logprobs else None
        reason = _reason(answer.finish_reason, bool(calls))
        return ChatChoice(index=index, message=message, logprobs=logprobs, **ending | {"finish_reason": reason})

    def _usage(self, usage: TokenUsage) -> Usage:
        details = CompletionTokensDetails(reasoning_tokens=usage.thinking_tokens)
        return ChatUsage(**super()._usage(usage).model_dump(), completion_tokens_details=details)


def _call_id(id: str) -> str:
    return id or f"call_{secrets.token_hex(12)}"


def _reason(reason: FinishReason | None, called: bool) -> ChatFinishReason | None:
    return "tool_calls" if reason == "stop" and called else reason


router = APIRouter(route_class=BoundedRoute, tags=["OpenAI"], dependencies=[Depends(require_json)])


@router.post("/v1/chat/completions", response_model=None, responses=streamed(ChatCompletion, ChatChunk))
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Continue a conversation."""
    service = service_of(request)
    service.check_model(body.model, "generate")
    writer = ChatWriter(
        service.settings.model_name,
        choices=body.n,
        thinking=body.include_reasoning,
        logprobs=body.logprobs,
        with_usage=body.wants_usage,
        with_ids=body.return_token_ids,
    )
    conversation = await service.prompts.run_in_thread(body.conversation)  # long arguments of calls are parsed
    return await respond_to(conversation, body.sampling(), writer, service=service, caller=request, stream=body.stream)
