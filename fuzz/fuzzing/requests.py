"""Requests of the API: each is answered, with a status below 500 and the form that the API promises.

An input is JSON: `path`, and `body`, which is sent as JSON, or as it is if it is a text; `leave` is the number of bytes
of the answer after which the client disconnects.
"""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

from fuzzing import small
from fuzzing.mutation import decoded, encoded, json_mutator
from fuzzing.serving_app import MODEL, Application
from fuzzing.target import Target
from minifloat.engine import Engine, EngineOptions

_RESPONSES, _MESSAGES, _COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
_PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", _RESPONSES, _MESSAGES, _COUNT)


@functools.cache
def _application() -> Application:
    return Application(
        Engine(small.STORYBOOK, EngineOptions(dtype="float32", kv_cache_memory=8 << 20, max_model_len=64))
    )


class Client:
    """One request through ASGI.

    Args:
        path: Path of the request.
        body: Its body.
        leave: Bytes of the answer after which the client disconnects; None: never.
    """

    def __init__(self, path: str, body: bytes, leave: int | None) -> None:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        self.scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "server": ("localhost", 80),
            "client": ("127.0.0.1", 1), "headers": [*headers, (b"content-length", str(len(body)).encode())],
        }  # fmt: skip
        self._pieces = [{"type": "http.request", "body": body, "more_body": False}]
        self._leave, self._gone = leave, asyncio.Event()
        self.status, self.body, self.ended = 0, b"", False

    async def receive(self) -> dict[str, Any]:
        """The next message of the client."""
        if self._pieces:
            return self._pieces.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        """The next message of the server."""
        if message["type"] == "http.response.start":
            assert not self.status, "two answers to one request"
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
            self.ended = not message.get("more_body")
        if self.ended or (self._leave is not None and len(self.body) >= self._leave):
            self._gone.set()

    @property
    def left(self) -> bool:
        """Whether the client disconnected before the end of the answer."""
        return self._gone.is_set() and not self.ended


def _run(data: bytes) -> None:
    value = decoded(data)
    if not isinstance(value, dict) or value.get("path") not in _PATHS:
        return
    body, leave = value.get("body"), value.get("leave")
    raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else encoded(body)
    application = _application()
    client = Client(value["path"], raw, leave if type(leave) is int else None)
    application.wait(application.app(client.scope, client.receive, client.send))
    if not application.engine.alive:
        _application.cache_clear()  # the next input finds an engine that works
        raise AssertionError("the request has stopped the engine")
    application.wait(application.idle())
    if not client.left:
        _judge(client)


def _judge(client: Client) -> None:
    assert client.ended, "the answer has no end"
    assert client.status == 200 or 400 <= client.status < 500, f"{client.status}: {client.body[:300]!r}"
    if client.status != 200:
        error = json.loads(client.body)["error"]
        fields = (
            {"message", "type"} if client.scope["path"].startswith(_MESSAGES) else {"message", "type", "param", "code"}
        )
        assert set(error) == fields, error
        assert error["message"]
    elif client.body.startswith(b"event: "):
        _judge_events(client.body.decode())
    elif client.body.startswith(b"data: "):
        events = client.body.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], events[-3:]
        for event in events[:-2]:
            _judge_choices(json.loads(event.removeprefix("data: ")))
    else:
        _judge_choices(json.loads(client.body))


def _judge_events(text: str) -> None:
    """Judge a stream of events with names, by the first and the last one."""
    *events, rest = text.split("\n\n")
    assert rest == "", rest[:300]
    parsed = [json.loads(event.partition("\ndata: ")[2]) for event in events]
    for line, event in zip(events, parsed, strict=True):
        assert line.startswith(f"event: {event['type']}\n"), line[:300]
    first, last = parsed[0]["type"], parsed[-1]["type"]
    assert (first, last) in (
        ("message_start", "message_stop"),
        ("response.created", "response.completed"),
        ("response.created", "response.incomplete"),
    ), (first, last)


def _judge_choices(answer: dict[str, Any]) -> None:
    assert not answer.get("error"), answer
    for choice in answer.get("choices", ()):
        assert choice["finish_reason"] in (None, "stop", "length", "tool_calls"), choice


def _seeds() -> dict[str, bytes]:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{1,5}$", "maxLength": 5},
            "age": {"type": "integer"},
        },
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"a": {"enum": [1, "x", None]}},
    }
    common = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    text = common | {"prompt": "Once upon a time"}
    chat = common | {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}
    sampling = {
        "temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"5": 2.5}, "min_tokens": 2,
        "stop": ["the", "\n"], "stop_token_ids": [7], "ignore_eos": True, "user": "u", "cache_salt": "s",
    }  # fmt: skip
    grammar = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    }
    bodies: dict[str, tuple[str, Any]] = {
        "text": (_PATHS[0], text | sampling),
        "stream": (_PATHS[0], text | {"stream": True, "stream_options": {"include_usage": True}, "logprobs": 2}),
        "echo": (_PATHS[0], text | {"echo": True, "logprobs": 3, "prompt": [[1, 2, 3], [4, 5]], "max_tokens": 0}),
        "grammar": (_PATHS[1], chat | grammar | {"max_tokens": 20}),
        "object": (_PATHS[0], text | {"response_format": {"type": "json_object"}, "n": 2, "temperature": 1}),
        "chat": (_PATHS[1], chat | {"logprobs": True, "top_logprobs": 2, "stream": True, "chat_template_kwargs": {}}),
        "tools": (_PATHS[1], common | _chat_with_tools(schema) | {"tool_choice": "required", "stream": True}),
        "tools-thinking": (_PATHS[1], common | _chat_with_tools(schema) | {"max_reasoning_tokens": 2, "n": 2}),
        "rules": (_PATHS[1], chat | {"structured_outputs": {"regex": "[a-z]+( [0-9]{2,3})?"}, "max_tokens": 9}),
        "tags": (
            _PATHS[0],
            text
            | {
                "response_format": {
                    "type": "structural_tag",
                    "triggers": ["<f"],
                    "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
                }
            },
        ),
        "tokenize": (_PATHS[2], {"prompt": "Hello", "add_special_tokens": True, "return_token_strs": True}),
        "tokenize-chat": (_PATHS[2], {"messages": chat["messages"]}),
        "detokenize": (_PATHS[3], {"tokens": [5, 6, 7]}),
        "raw": (_PATHS[0], '{"model": "fuzzed", "prompt": "x", "max_tokens": 1, "max_tokens": 2}'),
    }
    seeds = {name: encoded({"path": path, "body": body}) for name, (path, body) in bodies.items()}
    seeds |= _seeds_of_items(schema)
    return seeds | {
        "leaves": encoded({"path": _PATHS[0], "body": text | {"stream": True, "max_tokens": 50}, "leave": 10})
    }


def _chat_with_tools(schema: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "f", "description": "d", "parameters": schema, "strict": True}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"name": "x"}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "x"}]},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
    ]
    return {
        "messages": messages, "tools": [{"type": "function", "function": function}], "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": True, "x": [{"y": None}]}, "documents": [{"title": "t"}],
        "reasoning_effort": "low", "include_reasoning": True, "continue_final_message": False,
    }  # fmt: skip


def _seeds_of_items(schema: dict[str, Any]) -> dict[str, bytes]:
    """Return requests of the APIs of items."""
    function = {"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": True}
    responses = {"model": MODEL, "max_output_tokens": 4, "instructions": "Be brief."}
    items = [
        {"role": "developer", "content": "x"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"name": "x"}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "y"}]},
        {"type": "custom_tool_call", "call_id": "e", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "e", "output": "y"},
    ]
    tools = [function, {"type": "custom", "name": "g"}, {"type": "web_search"}]
    tools.append({"type": "namespace", "name": "n", "description": "d", "tools": [function]})
    tool = {"name": "f", "description": "d", "input_schema": schema, "strict": True}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"name": "x"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "y", "is_error": True}]},
        {"role": "system", "content": "note"},
    ]
    messages = {"model": MODEL, "max_tokens": 4, "system": "Be brief.", "messages": turns, "tools": [tool]}
    bodies: dict[str, tuple[str, Any]] = {
        "response": (_RESPONSES, responses | {"input": items, "tools": tools, "tool_choice": "auto", "stream": True}),
        "response-text": (
            _RESPONSES,
            responses
            | {"input": "Hello", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
            | {"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}},
        ),
        "message": (_MESSAGES, messages | {"tool_choice": {"type": "auto"}, "stream": True, "stop_sequences": ["the"]}),
        "message-text": (
            _MESSAGES,
            messages
            | {"tools": [], "thinking": {"type": "enabled", "budget_tokens": 2}, "output_config": {"effort": "high"}},
        ),
        "count": (_COUNT, {name: messages[name] for name in ("model", "messages", "system", "tools")}),
    }
    return {name: encoded({"path": path, "body": body}) for name, (path, body) in bodies.items()}


_TEXTS = r"""
prompt messages role content system user assistant tool type text image_url best_of suffix max_completion_tokens
tools tool_choice functions $ref $defs # #/$defs/a anyOf allOf oneOf not if then enum const pattern format
date-time uuid minimum maximum multipleOf items prefixItems minItems maxItems uniqueItems patternProperties
minLength ^a{1000}$ (a|b)*c [^\x00-\x7f]+ ^(?=x)y$ string number integer object array boolean null
response_format json_object json_schema prompt_logprobs top_logprobs continue_final_message logprobs
input output input_text output_text function function_call function_call_output call_id arguments tool_use tool_result
tool_use_id input_schema is_error thinking redacted_thinking budget_tokens custom namespace web_search
allowed_tools required any add_generation_prompt <s> </s> <|endoftext|> stream echo n leave
structured_outputs guided_json guided_regex guided_choice guided_grammar regex choice grammar start: ::= root
structural_tag triggers structures begin end tool_calls tool_call_id reasoning_content developer none auto
parallel_tool_calls max_reasoning_tokens reasoning_effort include_reasoning documents chat_template_kwargs <think>
"""
_WORDS = {*_PATHS, MODEL, *_TEXTS.split()}

TARGET = Target(_run, _seeds, seconds=5, mutate=json_mutator(_WORDS))
