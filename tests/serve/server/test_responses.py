"""OpenAI's Responses API, held to the types of the `openai` package and to its client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from conversations import TEMPLATE, call, saying
from fake_engine import FakeEngine
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter, ValidationError
from serving import MODEL, Client, running

from minifloat.engine import Delivery, TokenLogprob, TokenUsage
from minifloat.errors import UsageError
from minifloat.serve.api.answers import CollectedAnswer, Piece, TextScores
from minifloat.serve.api.responses import ResponsesRequest, ResponseWriter
from minifloat.serve.dialog.conversation import Conversation, Thinking, ToolChoice
from minifloat.serve.dialog.events import AnswerText, CallArguments, CallBegins, CallEnds, Event, ThinkingText
from minifloat.serve.server.errors import APIError

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "patches",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"},
}
SPACE = {"type": "namespace", "name": "mcp__files", "description": "files", "tools": [ADD | {"name": "read"}]}
SEARCH = {"type": "web_search", "external_web_access": False}


ADDED, PATCHED = '{"a": 1, "b": 2}', '{"input": "a\\n\\"b\\""}'


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": MODEL, "input": "hello"} | fields)


def conversation(**fields: Any) -> Conversation:
    body = request(**fields)
    return body.conversation_with(body.offered())


# ---------------------------------------------------------------------------------------------------- requests


def called(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_items_are_translated() -> None:
    items = [
        {"role": "developer", "content": "rules"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I go", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "status": None},
        {"type": "function_call", "call_id": "c2", "name": "read", "namespace": "mcp__files", "arguments": ""},
        {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "x"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "text"}]},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
    ]
    assert conversation(input=items, instructions="Be brief.").messages == [
        {"role": "system", "content": "Be brief.\nrules"},
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "I go",
            "reasoning_content": "hm",
            "tool_calls": [
                called("c1", "add", {"a": 1}),
                called("c2", "mcp__files__read", {}),
                called("c3", "patch", {"input": "x"}),
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "name": "mcp__files__read", "content": "text"},
        {"role": "tool", "tool_call_id": "c3", "name": "patch", "content": "done"},
    ]


def test_tools_of_all_kinds_are_functions_for_the_model() -> None:
    tools = conversation(tools=[ADD | {"strict": True}, SEARCH, PATCH, SPACE]).tools
    assert [(tool.name, tool.strict) for tool in tools] == [
        ("add", True),
        ("patch", False),
        ("mcp__files__read", False),
    ]
    assert tools[1].description == "patches\n\nThe input follows this grammar:\nstart: /x+/"
    assert tools[1].parameters["required"] == ["input"]


@pytest.mark.parametrize(
    ("fields", "attribute", "expected"),
    [
        ({"tools": [ADD], "tool_choice": "required"}, "choice", ToolChoice("required")),
        (
            {"tools": [ADD, PATCH], "tool_choice": {"type": "custom", "name": "patch"}},
            "choice",
            ToolChoice("required", ("patch",)),
        ),
        (
            {
                "tools": [ADD, PATCH],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "add"}],
                },
            },
            "choice",
            ToolChoice("auto", ("add",)),
        ),
        ({"parallel_tool_calls": False}, "parallel", False),
        ({"reasoning": {"effort": "none"}}, "thinking", Thinking(False)),
        ({"reasoning": {"effort": "minimal", "summary": "auto"}}, "thinking", Thinking(effort="low")),
        ({"input": "x", "instructions": ""}, "messages", [{"role": "user", "content": "x"}]),
    ],
)
def test_a_field_is_translated(fields: dict[str, Any], attribute: str, expected: Any) -> None:
    assert getattr(conversation(**fields), attribute) == expected


@pytest.mark.parametrize(
    ("format", "has_grammar"),
    [
        ({"type": "text"}, False),
        ({"type": "json_object"}, True),
        ({"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}, True),
    ],
)
def test_a_format_of_the_text_is_a_grammar(format: dict[str, Any], has_grammar: bool) -> None:
    assert (conversation(text={"format": format, "verbosity": "low"}).grammar is not None) == has_grammar


def test_what_codex_sends_is_accepted() -> None:
    body = request(
        instructions="You are Codex.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "permissions"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
        ],
        tools=[ADD | {"strict": False}, PATCH, SEARCH, {"type": "image_generation", "output_format": "png"}, SPACE],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning=None,
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="key",
        service_tier="auto",
        text={"verbosity": "low"},
        client_metadata={"session_id": "x"},
    )
    assert [tool["type"] for tool in writer(body).answer([CollectedAnswer()], TokenUsage(1, 0, 0)).tools] == [
        "function",
        "custom",
        "namespace",
    ]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "stores no responses"),
        ({"store": True}, "stores no responses"),
        ({"background": True}, "answers at once"),
        ({"conversation": {"id": "x"}}, "stores no conversations"),
        ({"include": ["message.output_text"]}, "Input should be"),
        ({"top_logprobs": 21}, "less than or equal to 20"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image is not"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference is not supported: this server stores"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "web_search_call is not supported"),
        ({"input": [{"type": "odd"}]}, "type: expected one of message"),
        ({"tools": [{"type": "odd"}]}, "type: expected one of function"),
        ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "web_search is not supported"),
        ({"tools": [ADD] * 129}, "at most 128"),
        ({"metadata": {"a": "b" * 600}}, "at most 512"),
        ({"max_output_tokens": 0}, "greater than"),
        ({"temperature": float("nan")}, "finite"),
        ({"n": 2}, "Extra inputs"),
        ({"instructions": "\ud800"}, "surrogate"),
    ],
)
def test_a_bad_field_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        request(**fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [SEARCH]}, "tools: web_search is not supported"),
        ({"tools": [ADD, ADD]}, "tools: two"),
        ({"tools": [SPACE | {"name": f"s{n}", "tools": [ADD] * 100} for n in range(2)]}, "tools: expected at most 128"),
        ({"tool_choice": "required"}, "tool_choice: "),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [ADD]}, "tool_choice: it names"),
        ({"input": []}, "input: it says nothing"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, r"input\[0\]: no call"),
        *(
            (
                {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": text}]},
                r"input\[0\]: arguments: ",
            )
            for text in ("[]", "{", "[" * 100_000, '{"a": ' * 100 + "1" + "}" * 100)
        ),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        conversation(**fields)


# ------------------------------------------------------------------------------------------- answers and streams

CALL = [CallBegins(0, "", "add"), CallArguments(0, '{"a"'), CallArguments(0, ": 1}"), CallEnds(0)]
SPACED = [CallBegins(1, "given", "mcp__files__read"), CallArguments(1, "{}"), CallEnds(1)]
CUSTOM = [CallBegins(0, "", "patch"), CallArguments(0, '{"input": "a'), CallArguments(0, '\\nb"}'), CallEnds(0)]
CUT: list[Event] = [CallBegins(0, "", "add"), CallArguments(0, '{"a": ')]
CUT_CUSTOM: list[Event] = [CallBegins(0, "", "patch"), CallArguments(0, '{"input": "a')]
ANSWERS: list[tuple[list[Event], str, list[str], list[str]]] = [
    ([], "stop", [], []),
    ([AnswerText("a"), AnswerText("b")], "stop", ["message"], ["completed"]),
    ([AnswerText("a")], "length", ["message"], ["incomplete"]),
    ([ThinkingText("t")], "length", ["reasoning"], ["incomplete"]),
    ([ThinkingText("t"), AnswerText("a"), *CALL], "stop", ["reasoning", "message", "function_call"], ["completed"] * 3),
    ([*CALL, AnswerText("so"), *SPACED], "length", ["function_call", "message", "function_call"], ["completed"] * 3),
    (CUSTOM, "stop", ["custom_tool_call"], ["completed"]),
    (CUT, "length", ["function_call"], ["incomplete"]),
    ([AnswerText("a"), *CUT], "stop", ["message", "function_call"], ["completed", "incomplete"]),
    (CUT_CUSTOM, "length", ["custom_tool_call"], ["incomplete"]),
]
USAGE = TokenUsage(10, 5, 4, 2)


def writer(body: ResponsesRequest) -> ResponseWriter:
    return ResponseWriter(MODEL, body, body.offered())


def pieces(events: list[Event], reason: str) -> list[Piece]:
    return [
        *(Piece([event], Delivery("r")) for event in events),
        Piece([], Delivery("r", finish_reason=reason, usage=USAGE)),
    ]


def with_tools(**fields: Any) -> ResponsesRequest:
    return request(tools=[ADD, PATCH, SPACE], metadata={"a": "b"}, **fields)


def whole(events: list[Event], reason: str, **fields: Any) -> dict[str, Any]:
    answer = CollectedAnswer()
    for piece in pieces(events, reason):
        answer.add(piece)
    return writer(with_tools(**fields)).answer([answer], USAGE).model_dump(exclude_unset=True)


def streamed(events: list[Event], reason: str, **fields: Any) -> list[Any]:
    written = writer(with_tools(**fields))
    chunks = [*written.opening()]
    for piece in pieces(events, reason):
        chunks += written.piece(0, piece)
    lines = [written.encode(event).decode() for event in (*chunks, *written.closing(USAGE))]
    stream = [json.loads(line.partition("data: ")[2]) for line in lines]
    assert [line.partition("\n")[0] for line in lines] == [f"event: {event['type']}" for event in stream]
    return stream


def comparable(output: list[Any]) -> list[Any]:
    """Return items without what is random."""
    return [
        item | {"id": index} | ({"call_id": "any"} if item.get("call_id", "given") != "given" else {})
        for index, item in enumerate(output)
    ]


@pytest.mark.parametrize(("events", "reason", "types", "statuses"), ANSWERS)
def test_an_answer_is_openais_and_its_stream_adds_up_to_it(
    events: list[Event], reason: str, types: list[str], statuses: list[str]
) -> None:
    fields = {"include": ["reasoning.encrypted_content"]}
    body = whole(events, reason, **fields)
    answer = Response.model_validate(body, strict=True)
    assert [item.type for item in answer.output] == types
    assert [item["status"] for item in body["output"]] == statuses
    assert answer.status == ("incomplete" if reason == "length" else "completed")
    assert answer.usage is not None
    assert (answer.usage.input_tokens_details.cached_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (
        4,
        2,
    )
    stream = streamed(events, reason, **fields)
    for event in stream:
        EVENTS.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert stream[-1]["type"] == f"response.{answer.status}"
    last = stream[-1]["response"]
    assert comparable(last["output"]) == comparable(body["output"])
    assert last["usage"] == body["usage"]
    done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    assert done == last["output"]


def test_events_come_in_openais_order_and_deltas_add_up() -> None:
    stream = streamed([ThinkingText("t"), AnswerText("a"), AnswerText("b"), *CALL], "stop")
    assert [event["type"].removeprefix("response.") for event in stream] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert "".join(event["delta"] for event in stream if event["type"].endswith("arguments.delta")) == '{"a": 1}'
    assert stream[0]["response"]["output"] == []


def test_a_custom_tool_is_called_with_its_text_and_a_namespace_is_told() -> None:
    assert whole(CUSTOM, "stop")["output"][0]["input"] == "a\nb"
    assert whole(CUT_CUSTOM, "length")["output"][0]["input"] == "a"
    item = whole(SPACED, "stop")["output"][0]
    assert (item["name"], item["namespace"], item["call_id"]) == ("read", "mcp__files", "given")


def scored(text: str, value: float = -0.5) -> TokenLogprob:
    return TokenLogprob(1, text, text.encode(), value, (TokenLogprob(1, text, text.encode(), value),))


@pytest.mark.parametrize(
    ("deliveries", "texts"),
    [
        ([([], ["<think>"]), ([ThinkingText("a")], ["a"]), ([], ["</think>"]), ([AnswerText("a")], ["a"])], ["a"]),
        ([([], ["<to"]), ([], ["day"]), ([AnswerText("<today x")], [" x"])], ["<to", "day", " x"]),
        ([([AnswerText("Hi")], [" Hi"]), ([AnswerText("!")], ["!", "</s>"])], [" Hi", "!"]),
        ([([], ["\ufffd"]), ([AnswerText("é")], ["\ufffd"])], ["\ufffd", "\ufffd"]),
        ([([AnswerText("a")], ["a"]), (CALL[:1], ["<call>", "x"]), (CALL[1:], ["}"])], ["a"]),
        ([([AnswerText("a"), *CALL], ["a", "<call>", "{}"])], ["a"]),
    ],
    ids=["thinking", "held back", "beside its text", "parts of a character", "call", "call at once"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_log_probabilities_are_those_of_the_text(
    deliveries: list[tuple[list[Event], list[str]]], texts: list[str], stream: bool
) -> None:
    scores, written, answer = (
        TextScores(),
        writer(with_tools(include=["message.output_text.logprobs"])),
        CollectedAnswer(),
    )
    events: list[Any] = []
    for said, tokens in deliveries:
        logprobs = tuple(scored(text) for text in tokens)
        piece = Piece(scores.add(said, logprobs), Delivery("r", logprobs=logprobs))
        answer.add(piece)
        events += written.piece(0, piece)
    events += written.closing(USAGE)
    body = written.answer([answer], USAGE).model_dump(exclude_unset=True)
    if stream:
        body = events[-1].response.model_dump(exclude_unset=True)
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert [entry["token"] for event in deltas for entry in event.logprobs] == texts
        for event in events:
            EVENTS.validate_python(event.model_dump(mode="json"))
    Response.model_validate(body, strict=True)
    (message,) = [item for item in body["output"] if item["type"] == "message"]
    assert [entry["token"] for entry in message["content"][0]["logprobs"]] == texts
    assert all(len(entry["top_logprobs"]) == 1 for entry in message["content"][0]["logprobs"])


@pytest.mark.parametrize(
    ("fields", "alternatives", "tokens"),
    [
        ({}, None, None),
        ({"top_logprobs": 0}, None, None),
        ({"include": ["message.output_text.logprobs"]}, 0, 65536),
        ({"top_logprobs": 3, "max_output_tokens": 7}, 3, 7),
        ({"top_logprobs": 20, "max_output_tokens": 9999}, 20, 3120),
    ],
)
def test_log_probabilities_are_asked_for_and_bounded(
    fields: dict[str, Any], alternatives: int | None, tokens: int | None
) -> None:
    sampling = request(**fields).sampling().bounded(1)
    assert (sampling.logprobs, sampling.max_tokens) == (alternatives, tokens)


def test_thinking_comes_back_in_every_form_that_clients_keep() -> None:
    (item,) = whole([ThinkingText("hm ñ")], "stop", include=["reasoning.encrypted_content"])["output"]
    expected = [{"role": "assistant", "content": "", "reasoning_content": "hm ñ"}]
    assert conversation(input=[item]).messages == expected
    assert conversation(input=[item | {"content": None}]).messages == expected
    summary = [{"type": "summary_text", "text": "hm ñ"}]
    for foreign in (None, "gAAAA", "minifloat:%", "minifloat:/w=="):
        kept = item | {"content": [], "encrypted_content": foreign, "summary": summary}
        assert conversation(input=[kept]).messages == expected


def test_a_stream_that_fails_ends_with_what_there_was() -> None:
    written = writer(with_tools())
    for event in [AnswerText("a"), *CUT]:
        list(written.piece(0, Piece([event], Delivery("r"))))
    line = written.failure(APIError(500, "exploded")).decode()
    event = json.loads(line.partition("data: ")[2])
    EVENTS.validate_python(event, strict=True)
    assert event["response"]["error"] == {"code": "server_error", "message": "exploded"}
    assert [item["status"] for item in event["response"]["output"]] == ["incomplete", "incomplete"]


# ------------------------------------------------------------------------------------------------------ sockets


@pytest.fixture(scope="module")
def sdk(client: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.url}/v1", api_key="-", max_retries=0) as made:
        yield made


def test_the_sdk_gets_the_same_response_streamed_and_whole(sdk: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 20, "instructions": "x"}
    answer = sdk.responses.create(**fields)
    Response.model_validate(answer.model_dump(), strict=True)
    assert answer.status == "incomplete"
    with sdk.responses.stream(**fields) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == answer.output_text != ""


TURNS = [
    f"<think>two</think>Both. {call('add', ADDED)}\n{call('patch', PATCHED)}\n{call('mcp__files__read', '{}')}",
    "Done.",
]


@pytest.fixture(scope="module")
def agent(tokenizer: Any) -> Iterator[openai.OpenAI]:
    """A client of a model that calls three tools, and then ends."""
    with (
        running(saying(tokenizer, TURNS), chat_template=TEMPLATE) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_the_sdk_runs_to_its_end(agent: openai.OpenAI, stream: bool) -> None:
    conversation: Any = [{"role": "user", "content": "go"}]
    ask: Any = {"model": MODEL, "tools": [ADD, PATCH, SPACE], "include": ["reasoning.encrypted_content"]}
    calls: list[Any] = []
    while True:
        if stream:
            with agent.responses.stream(input=conversation, **ask) as events:
                answer: Any = events.get_final_response()
        else:
            answer = agent.responses.create(input=conversation, **ask)
        Response.model_validate(answer.model_dump(warnings=False), strict=True)
        assert answer.status == "completed"
        conversation += answer.output
        found = [item for item in answer.output if item.type.endswith("_call")]
        if not found:
            break
        calls += found
        conversation += [{"type": f"{item.type}_output", "call_id": item.call_id, "output": "ok"} for item in found]
    assert [(item.type, item.name, getattr(item, "namespace", None)) for item in calls] == [
        ("function_call", "add", None),
        ("custom_tool_call", "patch", None),
        ("function_call", "read", "mcp__files"),
    ]
    assert (calls[0].arguments, calls[1].input) == (ADDED, 'a\n"b"')
    assert answer.output_text == "Done."


def test_the_sdk_parses_arguments_by_its_own_type(agent: openai.OpenAI) -> None:
    class Add(BaseModel):
        a: int
        b: int

    answer = agent.responses.parse(model=MODEL, input="go", tools=[openai.pydantic_function_tool(Add, name="add")])
    (called,) = [item for item in answer.output if item.type == "function_call"]
    assert called.parsed_arguments == Add(a=1, b=2)
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


class Choice(BaseModel):
    """An answer that follows a schema."""

    word: Literal["yes", "no"]


def test_the_sdk_parses_an_answer_that_follows_a_schema(tokenizer: Any) -> None:
    engine = saying(tokenizer, ['{"word": "yes"}'])
    with (
        running(engine, chat_template=TEMPLATE) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        answer = client.responses.parse(model=MODEL, input="x", text_format=Choice)
    assert answer.output_parsed == Choice(word="yes")
    assert engine.requests[0].params.grammar is not None


def test_no_tool_is_called_that_may_not_be(agent: openai.OpenAI) -> None:
    answer = agent.responses.create(model=MODEL, input="go", tools=[ADD], tool_choice="none")  # type: ignore[list-item]
    assert {item.type for item in answer.output} == {"reasoning", "message"}


def test_errors_name_the_field(client: Client) -> None:
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    answer = client.post("/v1/responses", {"model": MODEL, "input": image})
    assert (answer.status, answer.error["param"]) == (400, "input[0].message.content[0]")
    answer = client.post("/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": "r"})
    assert (answer.status, answer.error["param"]) == (400, "previous_response_id")


def test_a_stream_that_fails_is_told_to_the_sdk(tokenizer: Any) -> None:
    with (
        running(FakeEngine(tokenizer, fails=lambda request: "exploded")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        last = list(client.responses.create(model=MODEL, input="x", stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "exploded" in last.response.error.message


def test_a_client_that_leaves_a_stream_cancels_it(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer, seconds=0.01)
    with (
        running(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        stream = client.responses.create(model=MODEL, input="x", stream=True)
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        engine.held = True  # it does not end by itself
        stream.close()
        assert server.idle()
