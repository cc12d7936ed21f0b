"""Anthropic's API, held to the types of the `anthropic` package and to its client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.beta_error_response import BetaErrorResponse
from conversations import TEMPLATE, call, saying
from fake_engine import FakeEngine
from pydantic import BaseModel, TypeAdapter, ValidationError
from serving import MODEL, Answer, Client, running

from minifloat.engine import Delivery, TokenUsage
from minifloat.errors import UsageError
from minifloat.serve.api.answers import CollectedAnswer, Piece
from minifloat.serve.api.messages import CountTokensRequest, MessagesRequest, MessageWriter
from minifloat.serve.dialog.conversation import Thinking, Tool, ToolChoice
from minifloat.serve.dialog.events import AnswerText, CallArguments, CallBegins, CallEnds, Event, ThinkingText
from minifloat.serve.server import read_api_keys

KEY = "a-key-for-tests"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
LARGE = {"enum": [1] * 15_000}
ADDED = '{"a": 1, "b": 2}'
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def request(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"model": MODEL, "max_tokens": 9, "messages": HELLO} | fields)


# ---------------------------------------------------------------------------------------------------- requests


def test_a_dialog_with_tools_is_translated() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "add", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "2"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be brief."}]
    conversation = request(
        messages=messages,
        system=system,
        tools=[TOOL | {"description": "adds", "strict": True}],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "max"},
    ).conversation()

    def called(id: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}

    assert conversation.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hm",
            "tool_calls": [called("t1", {"a": 1}), called("t2", {})],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "add", "content": "2"},
        {"role": "tool", "tool_call_id": "t2", "name": "add", "content": "Error: no"},
        {"role": "user", "content": "and?"},
    ]
    assert conversation.tools == (Tool("add", "adds", TOOL["input_schema"], True),)  # type: ignore[arg-type]
    assert conversation.choice == ToolChoice("required", ("add",))
    assert conversation.thinking == Thinking(True, "high", 1024)
    assert (conversation.parallel, conversation.continues) == (False, False)


@pytest.mark.parametrize(
    ("fields", "attribute", "expected"),
    [
        ({"tool_choice": {"type": "any"}, "tools": [TOOL]}, "choice", ToolChoice("required")),
        ({"tool_choice": {"type": "none"}}, "choice", ToolChoice("none")),
        ({"thinking": {"type": "disabled"}}, "thinking", Thinking(False)),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking", Thinking()),
        ({"messages": [*HELLO, {"role": "assistant", "content": "He said"}]}, "continues", True),
        ({"messages": HELLO * 2}, "messages", [{"role": "user", "content": "hello\nhello"}]),
    ],
)
def test_a_field_is_translated(fields: dict[str, Any], attribute: str, expected: Any) -> None:
    assert getattr(request(**fields).conversation(), attribute) == expected


def test_a_schema_of_the_output_is_a_grammar_and_sampling_is_taken_over() -> None:
    body = request(
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["END"],
    )
    sampling = body.sampling()
    assert body.conversation().grammar is not None
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0.5, 0.9, 40, ("END",))
    assert (sampling.max_tokens, sampling.must_fit) == (9, False)


def test_what_claude_code_sends_is_accepted() -> None:
    body = request(
        max_tokens=32000,
        system=[{"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]},
            {"role": "system", "content": "A note."},
        ],
        tools=[TOOL | {"eager_input_streaming": True, "defer_loading": False, "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": json.dumps({"device_id": "x", "session_id": "y"})},
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "medium"},
        temperature=1,
        stream=True,
    )
    assert body.conversation().messages[-1] == {
        "role": "user",
        "content": "<system-reminder>x</system-reminder>\nA note.",
    }


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "image is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search is not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash is not supported"),
        ({"tools": [{"type": "odd", "name": "x"}]}, "type: expected one of custom"),
        ({"tools": [TOOL] * 129}, "at most 128"),
        ({"tools": [TOOL | {"name": "a b"}]}, "pattern"),
        ({"tool_choice": {"type": "tool"}}, "has a name"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "role user has no"),
        ({"messages": []}, "at least 1"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
        ({"mcp_servers": []}, "Extra inputs"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"tools": [TOOL | {"input_schema": {"a": [[[]]] * 20_000}}]}, "more than 20000 values"),
    ],
)
def test_a_bad_field_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        request(**fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [TOOL, TOOL]}, "tools: two"),
        ({"tools": [TOOL | {"name": f"f{n}", "input_schema": LARGE} for n in range(2)]}, "tools: together"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: "),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [TOOL]}, "tool_choice: it names"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, r"messages\[0\]"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        request(**fields).conversation()


# ------------------------------------------------------------------------------------------- answers and streams

CALL = [CallBegins(0, "", "add"), CallArguments(0, '{"a"'), CallArguments(0, ": 1}"), CallEnds(0)]
EMPTY_CALL = [CallBegins(1, "given", "add"), CallEnds(1)]
CUT_CALL: list[Event] = [CallBegins(0, "", "add"), CallArguments(0, '{"a": 1, "b": "un')]
ANSWERS: list[tuple[list[Event], str, str | int | None, str, list[str]]] = [
    ([], "stop", None, "end_turn", []),
    ([AnswerText("a"), AnswerText("b")], "stop", None, "end_turn", ["text"]),
    ([AnswerText("a")], "stop", 7, "end_turn", ["text"]),
    ([AnswerText("a")], "stop", "END", "stop_sequence", ["text"]),
    ([AnswerText("a")], "length", None, "model_context_window_exceeded", ["text"]),
    ([ThinkingText("t"), AnswerText("a"), *CALL], "stop", None, "tool_use", ["thinking", "text", "tool_use"]),
    ([*CALL, AnswerText("so"), *EMPTY_CALL], "stop", None, "tool_use", ["tool_use", "text", "tool_use"]),
    (CUT_CALL, "length", None, "model_context_window_exceeded", ["tool_use"]),
]


def written(events: list[Event], reason: str, stop: str | int | None, max_tokens: int = 9) -> tuple[Message, list[Any]]:
    """Return an answer, and its events with the message that the SDK accumulates from them."""
    usage = TokenUsage(10, 5, 4)
    pieces = [Piece([event], Delivery("r")) for event in events]
    pieces.append(Piece([], Delivery("r", finish_reason=reason, stop_reason=stop, usage=usage)))
    answer = CollectedAnswer()
    for piece in pieces:
        answer.add(piece)
    writer = MessageWriter(MODEL, max_tokens)
    writer.prompts = [(1,) * 10]
    whole = Message.model_validate(writer.answer([answer], usage).model_dump(exclude_unset=True), strict=True)
    chunks = [
        *writer.opening(),
        *(event for piece in pieces for event in writer.piece(0, piece)),
        *writer.closing(usage),
    ]
    stream = [json.loads(writer.encode(chunk).decode().partition("data: ")[2]) for chunk in chunks]
    return whole, stream


def accumulated(stream: list[Any]) -> Any:
    from anthropic.lib.streaming._messages import accumulate_event

    snapshot, buffers = None, {}
    for event in stream:
        if event["type"] != "ping":
            parsed = EVENTS.validate_python(event, strict=True)
            snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    return snapshot


@pytest.mark.parametrize(("events", "reason", "stop", "stop_reason", "types"), ANSWERS)
def test_an_answer_is_anthropics_and_its_stream_adds_up_to_it(
    events: list[Event], reason: str, stop: str | int | None, stop_reason: str, types: list[str]
) -> None:
    whole, stream = written(events, reason, stop)
    assert whole.stop_reason == stop_reason
    assert whole.stop_sequence == (stop if isinstance(stop, str) else None)
    assert [block.type for block in whole.content] == types
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens, whole.usage.output_tokens) == (6, 4, 5)
    streamed = accumulated(stream).model_dump()
    for side in (expected := whole.model_dump(), streamed):
        for block in side["content"]:
            if block["type"] == "tool_use" and block["id"] != "given":
                assert block.pop("id").startswith("toolu_")
    assert streamed["content"] == expected["content"]
    assert {name: streamed[name] for name in ("id", "stop_reason", "stop_sequence", "usage")} == {
        name: expected[name] for name in ("id", "stop_reason", "stop_sequence", "usage")
    } | {"id": streamed["id"]}


def test_events_come_in_anthropics_order() -> None:
    _, stream = written([ThinkingText("t"), *CALL], "stop", None)
    assert [event["type"].removeprefix("content_block_") for event in stream] == [
        *("message_start", "ping", "start", "delta", "delta", "stop"),
        *("start", "delta", "delta", "stop", "message_delta", "message_stop"),
    ]
    assert stream[4]["delta"]["type"] == "signature_delta"
    assert [event["index"] for event in stream if "index" in event] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_limit_of_tokens_is_told_from_the_end_of_the_context() -> None:
    whole, _ = written([AnswerText("a")], "length", None, max_tokens=5)
    assert whole.stop_reason == "max_tokens"


# ------------------------------------------------------------------------------------------------------ sockets


@pytest.fixture(scope="module")
def guarded(tokenizer: Any) -> Iterator[Client]:
    with running(FakeEngine(tokenizer), api_keys=read_api_keys([KEY])) as server:
        yield server


@pytest.fixture(scope="module")
def sdk(guarded: Client) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=guarded.url, api_key=KEY, max_retries=0) as client:
        yield client


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content)


def test_the_sdk_gets_the_same_message_streamed_and_whole(sdk: anthropic.Anthropic) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 20, "messages": HELLO, "system": "x"}
    whole = sdk.messages.create(**fields)
    with sdk.messages.stream(**fields) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    assert "".join(pieces) == text_of(final) == text_of(whole) != ""
    assert final.usage == whole.usage
    Message.model_validate(whole.model_dump(), strict=True)


def test_the_sdk_stops_at_a_sequence_and_counts_tokens(sdk: anthropic.Anthropic) -> None:
    message = sdk.messages.create(model=MODEL, max_tokens=90, messages=HELLO, stop_sequences=["lo"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "lo")
    count = sdk.messages.count_tokens(model=MODEL, messages=HELLO)
    assert isinstance(count, MessageTokensCount)
    assert count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_an_answer_longer_than_the_context_ends_with_it(sdk: anthropic.Anthropic) -> None:
    message = sdk.messages.create(model=MODEL, max_tokens=3000, messages=HELLO)
    assert message.stop_reason == "model_context_window_exceeded"


def test_a_bearer_key_is_taken_too_and_no_other(guarded: Client) -> None:
    body = {"model": MODEL, "max_tokens": 1, "messages": HELLO}
    assert guarded.post("/v1/messages", body, authorization=f"Bearer {KEY}").status == 200
    assert guarded.post("/v1/messages", body, x_api_key=KEY, authorization="Bearer other").status == 200
    assert guarded.send("GET", "/v1/models", headers={"x-api-key": KEY}).status == 200
    for headers in ({}, {"x-api-key": "other"}, {"authorization": KEY}, {"x-api-key": f"Bearer {KEY}"}):
        assert guarded.send("POST", "/v1/messages", body, headers).status == 401


def check_error(answer: Answer, status: int, kind: str) -> str:
    assert answer.status == status, answer.body
    if kind != "request_too_large":  # Anthropic's documents have it, the package has no type for it
        BetaErrorResponse.model_validate(answer.json, strict=True)
    assert set(answer.json) == {"type", "error"}
    assert set(answer.json["error"]) == {"type", "message"}
    assert answer.json["error"]["type"] == kind
    return str(answer.json["error"]["message"])


def test_errors_have_anthropics_form(tokenizer: Any) -> None:
    good = {"model": MODEL, "max_tokens": 1, "messages": HELLO}
    path, key, bad = "/v1/messages", {"x-api-key": KEY}, "invalid_request_error"
    with running(FakeEngine(tokenizer), api_keys=read_api_keys([KEY]), max_body_bytes=5000) as client:

        def post(body: Any, path: str = path, **headers: str) -> Answer:
            return client.send("POST", path, body, key | headers)

        check_error(client.send("POST", path, good), 401, "authentication_error")
        check_error(post(good, host="evil.example"), 403, "permission_error")
        check_error(post(good | {"model": "other"}), 404, "not_found_error")
        check_error(post(good, f"{path}/batches"), 404, "not_found_error")
        check_error(client.send("GET", path, headers=key), 405, bad)
        check_error(post(b"{"), 400, bad)
        check_error(post(b" " * 6000), 413, "request_too_large")
        check_error(client.send("POST", path, b"{}", key | {"Content-Type": "text/plain"}), 415, bad)
        message = check_error(post(good | {"messages": [{"role": "user", "content": [IMAGE]}]}), 400, bad)
        assert message == "messages[0].content[0]: image is not supported: this server reads text only"
        long = good | {"messages": [{"role": "user", "content": "x" * 600}]}
        assert check_error(post(long), 400, bad).startswith("prompt is too long: ")
        assert client.complete(max_tokens=1).error["type"] == "authentication_error", "other routes keep OpenAI's form"


def test_a_full_queue_is_529_and_a_stream_that_fails_ends_with_an_error(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer, seconds=0.05)
    with running(engine, max_queue=0) as client, client.open_stream(max_tokens=500, n=8):
        engine.held = True  # the stream does not end before the next request
        answer = client.post("/v1/messages", {"model": MODEL, "max_tokens": 1, "messages": HELLO})
        check_error(answer, 529, "overloaded_error")
        assert answer.headers["retry-after"] == "1"
    failing = FakeEngine(tokenizer, fails=lambda request: "exploded")
    with (
        running(failing) as client,
        anthropic.Anthropic(base_url=client.url, api_key="-", max_retries=0) as sdk,
        pytest.raises(anthropic.APIStatusError, match="exploded"),
        sdk.messages.stream(model=MODEL, max_tokens=5, messages=HELLO) as stream,  # type: ignore[arg-type]
    ):
        stream.until_done()


TURNS = [f"<think>two</think>Both. {call('add', ADDED)}\n{call('add', '{}')}", "Done."]


@pytest.fixture(scope="module")
def agent(tokenizer: Any) -> Iterator[anthropic.Anthropic]:
    """A client of a model that calls a tool twice, and then ends."""
    with (
        running(saying(tokenizer, TURNS), chat_template=TEMPLATE) as server,
        anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_of_the_sdk_runs_to_its_end(agent: anthropic.Anthropic, stream: bool) -> None:
    calls: list[tuple[int, int]] = []

    @anthropic.beta_tool
    def add(a: int = 0, b: int = 0) -> str:
        """Add two numbers."""
        calls.append((a, b))
        return str(a + b)

    ask: Any = {"model": MODEL, "max_tokens": 500, "messages": HELLO, "tools": [add], "stream": stream}
    turns = list(agent.beta.messages.tool_runner(**ask))
    first, last = [turn.get_final_message() if stream else turn for turn in turns]
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.content[0].thinking == "two"
    assert (first.stop_reason, last.stop_reason) == ("tool_use", "end_turn")
    assert calls == [(1, 2), (0, 0)]
    assert text_of(last) == "Done."
    assert first.usage.output_tokens_details.thinking_tokens > 0


def test_a_stream_of_calls_is_a_message_of_the_sdk(agent: anthropic.Anthropic) -> None:
    tools: Any = [TOOL]
    with agent.messages.stream(model=MODEL, max_tokens=500, messages=HELLO, tools=tools) as stream:  # type: ignore[arg-type]
        inputs = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert len(inputs) > 3, "arguments come in pieces"
    assert [block.input for block in message.content if block.type == "tool_use"] == [{"a": 1, "b": 2}, {}]
    assert len({block.id for block in message.content if block.type == "tool_use"}) == 2


def test_no_tool_is_called_that_may_not_be(agent: anthropic.Anthropic) -> None:
    ask: Any = {"model": MODEL, "max_tokens": 500, "messages": HELLO, "tools": [TOOL]}
    message = agent.messages.create(**ask, tool_choice={"type": "none"})
    assert message.stop_reason == "end_turn"
    assert {block.type for block in message.content} == {"thinking", "text"}


class Choice(BaseModel):
    """An answer that follows a schema."""

    word: Literal["yes", "no"]


def test_the_sdk_parses_an_answer_that_follows_a_schema(tokenizer: Any) -> None:
    engine = saying(tokenizer, ['{"word": "yes"}'])
    with (
        running(engine, chat_template=TEMPLATE) as server,
        anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client,
    ):
        ask: Any = {"model": MODEL, "max_tokens": 60, "messages": HELLO, "output_format": Choice}
        assert client.messages.parse(**ask).parsed_output == Choice(word="yes")
    assert engine.requests[0].params.grammar is not None


def test_the_last_text_of_the_assistant_is_continued(tokenizer: Any) -> None:
    engine = saying(tokenizer, [" yes"])
    with running(engine, chat_template=TEMPLATE) as client:
        body = {"model": MODEL, "max_tokens": 9, "messages": [*HELLO, {"role": "assistant", "content": "He said"}]}
        assert client.post("/v1/messages", body).json["content"] == [{"type": "text", "text": " yes"}]
    assert tokenizer.decode(engine.requests[0].prompt).endswith("assistant: He said")


def test_a_count_of_tokens_refuses_what_only_answers_have() -> None:
    with pytest.raises(ValidationError, match="max_tokens"):
        CountTokensRequest.model_validate({"model": MODEL, "messages": HELLO, "max_tokens": 1})
