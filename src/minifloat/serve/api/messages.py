"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field, Tag, model_validator
from starlette.responses import Response

from minifloat.engine import Grammar, TokenLogprob, TokenUsage
from minifloat.engine.sampling import MAX_STOPS
from minifloat.errors import UsageError
from minifloat.serve.api.answers import AnswerPart, CollectedAnswer
from minifloat.serve.api.fields import MAX_MESSAGES, MAX_PARTS, Count, Json, StopString, Strict, TopK
from minifloat.serve.api.items import (
    EFFORTS,
    MAX_TOOLS,
    CallId,
    Ignored,
    PartWriter,
    StreamEvent,
    Text,
    ToolName,
    check_tools,
    joined,
    kind,
    text_or_list,
    written_arguments,
)
from minifloat.serve.api.respond import respond_to
from minifloat.serve.api.sampling import Sampling
from minifloat.serve.dialog.conversation import Conversation, Thinking, Tool, ToolChoice
from minifloat.serve.dialog.history import History, UnknownCall
from minifloat.serve.server.errors import NO_THREADS, AnthropicErrorBody, APIError
from minifloat.serve.server.openapi import answers, failures, streamed_events
from minifloat.serve.server.service import BoundedRoute, require_json, service_of

_TEXT_ONLY = "this server reads text only"
_OWN_TOOLS = "it belongs to Anthropic's servers or models; this server has tools of the type custom"
#: Kinds of blocks, and beginnings of types of tools, that are refused -> why.
_REFUSED_BLOCKS = dict.fromkeys(
    ("image", "document", "search_result", "container_upload", "tool_reference", "browser_state"), _TEXT_ONLY
)
_REFUSED_TOOLS = dict.fromkeys(
    (
        *("advisor", "bash", "browser", "code_execution", "computer", "mcp_toolset", "memory", "text_editor"),
        *("tool_search", "web_fetch", "web_search"),
    ),
    _OWN_TOOLS,
)
#: A line in the system prompt of Claude Code that changes with every request, and would defeat the prefix cache.
_BILLING = "x-anthropic-billing-header"
#: What thinking is signed with. Nothing checks it: thinking that comes back is read as it is.
_SIGNATURE = "unsigned"


class TextBlock(Strict):
    """A piece of text."""

    type: Literal["text"]
    text: Text
    cache_control: Ignored = None
    citations: Ignored = None


class ThinkingBlock(Strict):
    """What the model thought in an earlier turn."""

    type: Literal["thinking"]
    thinking: Text
    signature: Ignored = None


class RedactedThinkingBlock(Strict):
    """Thinking that only Anthropic can read; it is left out."""

    type: Literal["redacted_thinking"]
    data: Ignored = None


class ToolUseBlock(Strict):
    """A call of an earlier turn."""

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: Json
    cache_control: Ignored = None
    caller: Ignored = None
    toolset_name: Ignored = None


TextBlocks = Annotated[
    list[Annotated[TextBlock, kind("text", refused=_REFUSED_BLOCKS)]], Field(max_length=MAX_PARTS), Tag("list")
]
TextOrBlocks = Annotated[Annotated[Text, Tag("str")] | TextBlocks, text_or_list]


class ToolResultBlock(Strict):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextOrBlocks = ""
    is_error: bool | None = None
    cache_control: Ignored = None
    toolset_name: Ignored = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
    kind(
        *("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
        refused=_REFUSED_BLOCKS | {"server_tool_use": _OWN_TOOLS} | _REFUSED_TOOLS,
    ),
]
#: The blocks of each role, beside texts.
_OF_ROLE = {
    "user": (ToolResultBlock,),
    "assistant": (ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (),
}


class Turn(Strict):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[Text, Tag("str")] | Annotated[list[Block], Field(max_length=MAX_PARTS), Tag("list")], text_or_list
    ]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> Turn:
        for block in self.content if isinstance(self.content, list) else ():
            if not isinstance(block, (TextBlock, *_OF_ROLE[self.role])):
                raise ValueError(f"a message of the role {self.role} has no blocks of the type {block.type}")
        return self

    def add_to(self, history: History) -> None:
        """Add what the message says."""
        say = {"user": history.user, "assistant": history.say, "system": history.system}[self.role]
        for block in [self.content] if isinstance(self.content, str) else self.content:
            match block:
                case str(text) | TextBlock(text=text):
                    say(text)
                case ThinkingBlock(thinking=text):
                    history.think(text)
                case ToolUseBlock():
                    history.call(block.id, block.name, block.input)
                case ToolResultBlock():
                    text = joined(block.content)
                    history.result(block.tool_use_id, f"Error: {text}" if block.is_error else text)


class CustomTool(Strict):
    """A tool that the client runs."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: Text = ""
    input_schema: Json
    strict: bool | None = Field(default=None, description="Input that violates the schema is impossible.")
    cache_control: Ignored = None
    defer_loading: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None
    allowed_callers: Ignored = None

    def tool(self) -> Tool:
        return Tool(self.name, self.description, {"type": "object", **self.input_schema}, bool(self.strict))


_MODES: dict[str, Literal["none", "auto", "required"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


class Choice(Strict):
    """Which tools the answer uses."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> Choice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("the type tool has a name, and no other type has")
        return self

    def choice(self) -> ToolChoice:
        return ToolChoice(_MODES[self.type], () if self.name is None else (self.name,))


class ThinkingConfig(Strict):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = Field(default=None, description="Tokens of thinking, after which it is ended.")
    display: Ignored = None

    def thinking(self) -> tuple[bool | None, int | None]:
        """Return whether the model thinks, None if it chooses, and for how many tokens."""
        return {"enabled": True, "disabled": False}.get(self.type), self.budget_tokens


class JsonFormat(Strict):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Strict):
    """How the answer is written."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None
    task_budget: Ignored = None


class CountTokensRequest(Strict):
    """``POST /v1/messages/count_tokens``."""

    model: str = Field(max_length=512, description="The served model's name, as /v1/models gives it.")
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: TextOrBlocks = ""
    tools: Annotated[
        list[Annotated[CustomTool, kind("custom", refused=_REFUSED_TOOLS, default="custom")]],
        Field(max_length=MAX_TOOLS),
    ] = Field(default=[])
    tool_choice: Choice = Choice(type="auto")
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: Ignored = None
    context_management: Ignored = None
    speed: Ignored = None

    def conversation(self) -> Conversation:
        """Return the conversation."""
        history = History()
        for block in [self.system] if isinstance(self.system, str) else [block.text for block in self.system]:
            if not block.startswith(_BILLING):
                history.system(block)
        for number, turn in enumerate(self.messages):
            try:
                turn.add_to(history)
            except UnknownCall as error:
                raise UsageError(f"messages[{number}]: {error}") from error
        tools, choice = tuple(tool.tool() for tool in self.tools), self.tool_choice.choice()
        check_tools(tools, choice)
        enabled, budget = (None, None) if self.thinking is None else self.thinking.thinking()
        answer = self.output_config.format
        return Conversation(
            history.messages(),
            tools=tools,
            choice=choice,
            parallel=not self.tool_choice.disable_parallel_tool_use,
            thinking=Thinking(enabled, EFFORTS.get(self.output_config.effort or ""), budget),
            grammar=None if answer is None else Grammar.json_schema(answer.schema_),
            continues=history.ends_with_text,
        )


class MessagesRequest(CountTokensRequest):
    """``POST /v1/messages``."""

    max_tokens: Count = Field(description="At most as many as the context has room for.")
    stream: bool = False
    temperature: float | None = Field(default=None, ge=0, le=100, description="0: the most probable token.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: TopK | None = Field(default=None, description="0 or -1: all tokens.")
    stop_sequences: list[StopString] = Field(default=[], max_length=MAX_STOPS)
    thread: Ignored = Field(default=None, description="Refused, so that clients send the whole conversation.")
    metadata: Ignored = None
    service_tier: Ignored = None
    inference_geo: Ignored = None
    diagnostics: Ignored = None
    user_profile_id: Ignored = None

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            must_fit=False,
            stop=tuple(self.stop_sequences),
        )


class OutputTokens(BaseModel):
    """Tokens of the answer that are thinking."""

    thinking_tokens: int


class MessageUsage(BaseModel):
    """Numbers of tokens; `input_tokens` are those that the prefix cache did not have."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokens


class MessageBody(BaseModel):
    """Answer of ``/v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Answer of ``/v1/messages/count_tokens``."""

    input_tokens: int


class MessageWriter(PartWriter):
    """Writes answers of ``/v1/messages``.

    Args:
        model: Name of the model.
        max_tokens: That the request allows.
    """

    call_prefix = "toolu_"
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, model: str, max_tokens: int) -> None:
        super().__init__()
        self._model, self._max_tokens = model, max_tokens

    def answer(self, answers: Sequence[CollectedAnswer], usage: TokenUsage) -> MessageBody:
        (answer,) = answers
        reason, sequence = self._end_of(answer)
        return self._message([_block(self._named(part)) for part in answer.parts], reason, sequence, _usage(usage))

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: MessageUsage
    ) -> MessageBody:
        return MessageBody(
            id=f"msg_{self.name}",
            type="message",
            role="assistant",
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
        )

    def _end_of(self, answer: CollectedAnswer) -> tuple[str, str | None]:
        """Return why an answer ended, and the text that ended it."""
        if answer.finish_reason == "length":
            is_full = answer.usage.completion_tokens < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        if isinstance(answer.stop_reason, str):
            return "stop_sequence", answer.stop_reason
        return "tool_use" if any(part.kind == "call" for part in answer.parts) else "end_turn", None

    def opening(self) -> Iterable[StreamEvent]:
        begun = self._message([], None, None, _usage(TokenUsage(sum(map(len, self.prompts)), 0, 0)))
        return [StreamEvent.of("message_start", message=begun), StreamEvent.of("ping")]

    def _begin(self, index: int, part: AnswerPart) -> Iterable[StreamEvent]:
        return [StreamEvent.of("content_block_start", index=index, content_block=_block(part))]

    def _more(self, index: int, part: AnswerPart, text: str, logprobs: Sequence[TokenLogprob]) -> Iterable[StreamEvent]:
        kind, field = _DELTAS[part.kind]
        return [StreamEvent.of("content_block_delta", index=index, delta={"type": kind, field: text})]

    def _finish(self, index: int, part: AnswerPart) -> Iterable[StreamEvent]:
        if part.kind == "thinking":
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield StreamEvent.of("content_block_delta", index=index, delta=delta)
        yield StreamEvent.of("content_block_stop", index=index)

    def _ending(self, usage: TokenUsage) -> Iterable[StreamEvent]:
        reason, sequence = self._end_of(self._streamed)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield StreamEvent.of("message_delta", delta=delta, usage=_usage(usage))
        yield StreamEvent.of("message_stop")

    def failure(self, error: APIError) -> bytes:
        return self.encode(error.anthropic_body)


_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _block(part: AnswerPart) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if part.kind == "thinking":
        return {"type": "thinking", "thinking": part.text, "signature": _SIGNATURE if part.pieces else ""}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": written_arguments(part)}


def _usage(usage: TokenUsage) -> MessageUsage:
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokens(thinking_tokens=usage.thinking_tokens),
    )


router = APIRouter(route_class=BoundedRoute, tags=["Anthropic"], dependencies=[Depends(require_json)])


@router.post(
    "/v1/messages",
    response_model=None,
    responses=streamed_events(MessageBody, error=AnthropicErrorBody) | failures(529, body=AnthropicErrorBody),
)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    service.check_model(body.model, "generate")
    if body.thread is not None:
        raise APIError(400, "thread: this server stores nothing; send the whole conversation", code=NO_THREADS)
    writer = MessageWriter(service.settings.model_name, body.max_tokens)
    conversation = await service.prompts.run_in_thread(body.conversation)  # long results are joined
    return await respond_to(conversation, body.sampling(), writer, service=service, caller=request, stream=body.stream)


@router.post("/v1/messages/count_tokens", responses=answers(TokenCount, with_body=True, error=AnthropicErrorBody))
async def count_tokens(body: CountTokensRequest, request: Request) -> TokenCount:
    """The number of tokens of a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    conversation = await service.prompts.run_in_thread(body.conversation)
    return TokenCount(input_tokens=len((await service.prompts.encode_chat(conversation)).prompt))
