"""The attacks of test_threats.py, and the prefix cache, with requests of items: Responses and Messages."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from conversations import TEMPLATE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import MODEL, Answer, Client, running

from minifloat.engine import Engine
from minifloat.serve.api.messages import MessagesRequest
from minifloat.serve.api.responses import ResponsesRequest
from minifloat.serve.server import read_api_keys

KEY, OTHER_KEY = "the-first-key", "the-other-key"
Ask = Callable[..., Answer]


def respond(client: Client, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 2} | fields
    return client.send("POST", "/v1/responses", body, headers)


def message(client: Client, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2} | fields
    return client.send("POST", "/v1/messages", body, headers)


def tools(ask: Ask, schemas: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    named = [(f"f{number}", schema) for number, schema in enumerate(schemas)]
    if ask is message:
        return [{"name": name, "input_schema": schema} | fields for name, schema in named]
    return [{"type": "function", "name": name, "parameters": schema} | fields for name, schema in named]


both = pytest.mark.parametrize("ask", [respond, message])


@both
@pytest.mark.parametrize("schemas", [[{}] * 129, [{}] * 10_000, [{"enum": [0] * 9999}] * 3])
def test_very_many_or_very_large_tools_are_refused_at_once(
    client: Client, ask: Ask, schemas: list[dict[str, Any]]
) -> None:
    started = time.monotonic()
    answer = ask(client, tools=tools(ask, schemas))
    assert (answer.status, "tools: " in answer.json["error"]["message"]) == (400, True), answer.body
    assert time.monotonic() - started < 2


@both
def test_old_calls_are_parsed_beside_the_event_loop(client: Client, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name = {
        respond: (ResponsesRequest, "conversation_with"),
        message: (MessagesRequest, "conversation"),
    }[ask]
    make, threads = getattr(kind, name), []

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return make(*arguments)

    monkeypatch.setattr(kind, name, noted)
    assert ask(client).status == 200
    assert [thread.startswith("minifloat-tokenizer") for thread in threads] == [True]


@both
def test_a_model_of_random_weights_calls_with_valid_arguments(tiny: Engine, ask: Ask) -> None:
    word = {"type": "object", "properties": {"word": {"enum": ["yes", "no"]}}, "required": ["word"]}
    schema = word | {"additionalProperties": False}
    with running(tiny, chat_template=TEMPLATE) as client:
        for number in range(5):
            fields: dict[str, Any] = {"max_tokens": 200, "thinking": {"type": "disabled"}}
            if ask is respond:
                fields = {"max_output_tokens": 200, "reasoning": {"effort": "none"}, "parallel_tool_calls": False}
            one = {"type": "any", "disable_parallel_tool_use": True} if ask is message else "required"
            answer = ask(client, tools=tools(ask, [schema] * 3, strict=number % 2 == 0), tool_choice=one, **fields).json
            (call,) = answer["content"] if ask is message else answer["output"]
            assert call["name"] in ("f0", "f1", "f2")
            arguments = call["input"] if ask is message else json.loads(call["arguments"])
            assert arguments in ({"word": "yes"}, {"word": "no"})


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


BOMBS: list[dict[str, Any]] = [
    {"type": "nothing"},
    {"type": "string", "pattern": "["},
    {"$ref": "#/$defs/missing"},
    {"$ref": "https://example.com/schema.json"},
    {"enum": ["x" * 100] * 5_000},
    deep(500),
]


@both
def test_a_bad_schema_fails_only_its_own_request(tiny: Engine, ask: Ask) -> None:
    with running(tiny) as client:
        for schema in BOMBS:
            form: dict[str, Any] = {"type": "json_schema", "schema": schema}
            wanted = (
                {"output_config": {"format": form}} if ask is message else {"text": {"format": form | {"name": "x"}}}
            )
            assert ask(client, **wanted).status == 400, schema
            assert ask(client).status == 200


@both
def test_no_url_in_a_request_is_fetched(client: Client, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[Any] = []
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: resolved.append(host) or resolve(host, *rest, **more)
    )
    url = "http://attacker.example/x.png"
    parts = [
        {"type": "input_image", "image_url": url},
        {"type": "input_file", "file_url": url},
        {"type": "image", "source": {"type": "url", "url": url}},
        {"type": "document", "source": {"type": "url", "url": url}},
        {"type": "text", "text": "x", "url": url},
    ]
    for part in parts:
        content = [{"role": "user", "content": [part]}]
        answer = ask(client, **{"messages" if ask is message else "input": content})
        assert answer.status == 400, answer.body
    assert set(resolved) <= {"127.0.0.1"}


ODD = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([2**63, -(2**63) - 1, 10**400, True, False, None, "1", "", [], {}, [[]], "\ud800"]),
)
NUMBERS = ("max_tokens", "max_output_tokens", "temperature", "top_p", "top_k", "stream", "stop_sequences", "tools")


@both
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(NUMBERS), value=ODD)
def test_odd_values_are_accepted_or_refused(client: Client, ask: Ask, name: str, value: Any) -> None:
    assert ask(client, **{name: value}).status in (200, 400)


@both
def test_a_cached_prefix_is_shared_only_by_requests_with_the_same_key(tiny: Engine, ask: Ask) -> None:
    prompt = "a prompt of several blocks of the cache, which is long enough to be shared with others " * 2

    def cached(key: str) -> int:
        content = {"instructions": prompt} if ask is respond else {"system": prompt}
        usage = ask(client, {"x-api-key": key}, **content).json["usage"]
        if ask is message:
            return int(usage["cache_read_input_tokens"])
        return int(usage["input_tokens_details"]["cached_tokens"])

    with running(tiny, api_keys=read_api_keys([KEY, OTHER_KEY])) as client:
        assert cached(KEY) == 0
        assert cached(KEY) > 0
        assert cached(OTHER_KEY) == 0


@both
def test_a_turn_computes_what_is_new_although_a_system_message_is_added_to_each(tiny: Engine, ask: Ask) -> None:
    """As Claude Code does it: folded into the turn before it, it leaves the beginning of the prompt as it was."""
    name = "messages" if ask is message else "input"
    turns: list[dict[str, Any]] = []
    before = 0
    with running(tiny) as client:
        for number in range(4):
            turns += [
                {"role": "user", "content": f"question {number} of a user who has many of them"},
                {"role": "system", "content": f"note {number}"},
            ]
            usage = ask(client, **{name: turns}).json["usage"]
            if ask is message:
                cached = usage["cache_read_input_tokens"]
                prompt = usage["input_tokens"] + cached
            else:
                prompt, cached = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
            assert cached >= before - 32, "all but the last blocks"
            before = prompt
            turns.append({"role": "assistant", "content": "an answer"})
