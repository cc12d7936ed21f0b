"""Attacks that other servers have suffered, each with a test through a real socket.

Docstrings name the vulnerability of the other server. Attacks through the files of a model are tested where the files
are read: shards outside of the folder, links, NUL bytes and pickled weights (`tests/checkpoint/test_reader.py`), false
headers (`tests/checkpoint/test_header.py`, `test_fuzz.py`), code and kernels that a config.json names
(`tests/runtime/test_load.py`), scales that are NaN, zero or of the wrong shape
(`tests/runtime/test_load_other_tools.py`).
"""

from __future__ import annotations

import gc
import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import MODEL, PATIENCE, Client, running, wait_for

from minifloat.engine import Engine
from minifloat.errors import StorageError, UsageError
from minifloat.serve.server import read_api_keys

KEY, OTHER_KEY = "the-first-key", "the-other-key"
JSON = "Content-Type: application/json"


def raw(client: Client, *lines: str, body: bytes = b"", chunks: Iterable[bytes] = ()) -> bytes:
    """Send raw bytes and return the answer of the server, or what came of it before the connection closed."""
    with client.connect() as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        try:
            for chunk in chunks:
                connection.sendall(chunk)
        except OSError:
            pass  # the server closed the connection in the middle; its answer is still to be read
        received = b""
        try:
            while b"\r\n\r\n" not in received or not received.partition(b"\r\n\r\n")[2]:
                piece = connection.recv(65536)
                if not piece:
                    break
                received += piece
        except (TimeoutError, ConnectionError):
            pass
        return received


# ------------------------------------------------------------------------------------------------- templates


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages|attr('__class__') }}",
        "{% set x = namespace(__class__=1) %}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if %}",
    ],
)
def test_a_template_that_reaches_out_of_its_sandbox_or_breaks_is_a_400(tokenizer: Any, template: str) -> None:
    """CVE-2024-34359, CVE-2026-5760."""
    with running(FakeEngine(tokenizer), chat_template=template) as client:
        answer = client.chat("x")
        assert (answer.status, answer.error["param"]) == (400, "messages"), answer.body
        assert client.complete(max_tokens=2).status == 200


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(2000) %}{{ messages[0].content }}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_writes_too_much_is_stopped(tokenizer: Any, template: str) -> None:
    with running(FakeEngine(tokenizer), chat_template=template) as client:
        answer = client.chat("x" * 100)
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "characters" in answer.error["message"]


@pytest.mark.parametrize(
    "name",
    [
        *("tokenize", "tokenizer", "chat_template", "add_generation_prompt", "messages", "bos_token", "tools"),
        *("continue_final_message", "max_characters", "documents", "image_tokens"),
    ],
)
def test_a_request_sets_no_argument_of_the_function_that_renders(client: Client, name: str) -> None:
    """CVE-2025-61620, CVE-2025-62426."""
    answer = client.chat("x", chat_template_kwargs={name: True})
    assert (answer.status, answer.error["param"]) == (400, f"chat_template_kwargs.{name}")
    refused = client.chat("x", chat_template="{{ 1 }}")
    assert (refused.status, refused.error["param"]) == (400, "chat_template")


def test_variables_of_a_template_are_values_and_nothing_else(client: Client) -> None:
    names = ("self", "range", "raise_exception", "namespace", "loop", "environment", "args")
    odd = {name: [{"a": None}] for name in names}
    assert client.chat("x", chat_template_kwargs=odd, max_tokens=1).status == 200
    for kwargs in ({"__class__": 1}, {"a b": 1}, {"": 1}, {"x" * 65: 1}, {f"x{n}": 1 for n in range(65)}):
        assert client.chat("x", chat_template_kwargs=kwargs).status == 400
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    refused = client.chat("x", chat_template_kwargs={"x": deep})
    assert (refused.status, refused.error["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize("count", [129, 10_000])
def test_very_many_tools_are_refused_at_once(client: Client, count: int) -> None:
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object"}}} for n in range(count)
    ]
    started = time.monotonic()
    answer = client.chat("x", tools=tools)
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert time.monotonic() - started < 2
    several = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"enum": [0] * 9999}}} for n in range(3)
    ]
    answer = client.chat("x", tools=several)
    assert (answer.status, answer.error["param"]) == (400, "tools"), "too large together"


# ------------------------------------------------------------------------------------------------- sizes


class _UnusableTokenizer:
    """A tokenizer that fails when it is used."""

    chat_template = "x"

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("tokenized")

    apply_chat_template = decode = __call__


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 10**9},
        {"n": -1},
        {"best_of": 10**9},
        {"logprobs": 10**6},
        {"stop": ["x"] * 100},
        {"stop": "x" * 10_000},
        {"stop_token_ids": list(range(10_000))},
        {"bad_words": ["x"] * 1_000},
        {"bad_words": ["x" * 10_000]},
        {"priority": 2**63},
        {"logit_bias": {str(i): 1 for i in range(5_000)}},
        {"prompt": ["x"] * 10_000},
        {"prompt": [[1]] * 10_000},
        {"prompt": "x" * 200_000},
        {"prompt": [2**31]},
        {"prompt": []},
        {"prompt": [[]]},
        {"max_tokens": 0},
        {"user": "x" * 10_000},
        {"cache_salt": "x" * 10_000},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_value_out_of_bounds_is_refused_before_anything_is_tokenized(fields: dict[str, Any]) -> None:
    """CVE-2024-8939."""
    with running(FakeEngine(_UnusableTokenizer())) as client:
        answer = client.complete(**{"prompt": "x", **fields})
        assert (answer.status, answer.error["param"]) == (400, next(iter(fields)))


def test_tokens_of_prompts_are_bounded_in_an_answer(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minifloat.serve.server.service.MAX_PROMPT_LOGPROBS", 40)
    assert client.complete([5] * 20, n=2, return_token_ids=True).status == 200
    refused = client.complete([5] * 21, n=2, return_token_ids=True)
    assert (refused.status, refused.error["param"]) == (400, "return_token_ids")


def test_too_many_messages_or_parts_are_refused_before_anything_is_tokenized() -> None:
    with running(FakeEngine(_UnusableTokenizer())) as client:
        message = {"role": "user", "content": "x"}
        for messages in ([], [message] * 5_000, [{"role": "user", "content": "x" * 200_000}]):
            answer = client.post("/v1/chat/completions", {"model": MODEL, "messages": messages})
            assert (answer.status, answer.error["param"]) == (400, "messages")
        parts = [{"type": "text", "text": "x"}] * 5_000
        assert client.chat(parts).status == 400


def test_a_body_of_100_megabytes_is_refused_while_it_is_read(client: Client) -> None:
    """CVE-2024-8768: in chunks, without a header that states the size; and with such a header."""
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(100):
            yield b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
            sent += 1

    head = ("POST /v1/completions HTTP/1.1", "Host: localhost", JSON)
    answer = raw(client, *head, "Transfer-Encoding: chunked", chunks=chunks())
    assert answer.startswith(b"HTTP/1.1 413"), answer[:200]
    assert sent < 50, "the server went on reading"
    answer = raw(client, *head, f"Content-Length: {100 << 20}")
    assert answer.startswith(b"HTTP/1.1 413")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert client.complete(max_tokens=1).status == 200


def test_a_content_length_that_is_no_number_or_too_large_is_refused(client: Client) -> None:
    head = ("POST /v1/completions HTTP/1.1", "Host: localhost", JSON)
    for length in ("-1", "1e9", "0x10", "9" * 100):
        assert raw(client, *head, f"Content-Length: {length}").startswith((b"HTTP/1.1 400", b"HTTP/1.1 413"))


def test_endless_headers_are_refused(client: Client) -> None:
    """CVE-2025-48956: in one piece, and in pieces that never end."""
    many = [f"X-{i}: {'x' * 1000}" for i in range(100)]
    assert raw(client, "GET /health HTTP/1.1", "Host: localhost", *many).startswith(b"HTTP/1.1 431")
    with client.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        sent = 0
        try:
            while sent < 100_000_000:  # far more than the buffers of both sockets hold
                sent += connection.send(b"X-Line: " + b"x" * 1000 + b"\r\n")
        except OSError:
            pass  # the server has closed the connection
    assert sent < 100_000_000
    assert client.get("/health").status == 200


def test_connections_with_a_slow_body_or_no_request_are_closed(tokenizer: Any) -> None:
    with running(FakeEngine(tokenizer), read_timeout=0.3, keep_alive_timeout=0.3) as client:
        head = ("POST /v1/completions HTTP/1.1", "Host: localhost", JSON, "Content-Length: 100")
        assert raw(client, *head, body=b"{").startswith(b"HTTP/1.1 408")
        with client.connect() as silent:
            silent.settimeout(PATIENCE)
            assert silent.recv(1) == b""
        with client.connect() as half:
            half.settimeout(PATIENCE)
            half.sendall(b"GET /hea")
            assert half.recv(1) == b""


def test_empty_and_too_long_prompts_are_refused_and_the_longest_is_accepted(client: Client) -> None:
    assert client.complete("", max_tokens=1).json["usage"]["prompt_tokens"] == 1, "the token that begins a text"
    for empty in ([], [[]], [""] * 0):
        assert client.complete(empty).error["param"] == "prompt"
    assert client.complete("x" * 511).status == 200
    assert client.complete("x" * 512).error["param"] == "prompt"
    assert client.complete([1] * 512).error["param"] == "prompt"


# ------------------------------------------------------------------------------------------------- grammars


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


SCHEMA_BOMBS: list[Any] = [
    {"type": "nothing"},
    {"type": "string", "pattern": "((((a{1,1000}){1,1000}){1,1000}){1,1000}"},
    {"type": "string", "pattern": "["},
    {"$ref": "#/$defs/missing"},
    {"$ref": "https://example.com/schema.json"},
    {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
    {"enum": ["x" * 100] * 5_000},
    _deep(500),
    {"anyOf": [_deep(20) for _ in range(2_000)]},
    {"type": "object", "properties": {f"p{i}": {"type": "string", "minLength": 10**9} for i in range(100)}},
]


def test_a_bad_schema_fails_only_its_own_request(tiny: Engine) -> None:
    """CVE-2025-48942, -48943, -48944, CVE-2025-58446. Some of them are valid grammars that only start slowly."""
    with running(tiny) as client:
        for schema in SCHEMA_BOMBS:
            response_format = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}
            answer = client.complete("x", max_tokens=2, response_format=response_format)
            assert answer.status in (200, 400), (schema, answer.body)
            if answer.status == 400:
                assert answer.error["param"].startswith("response_format"), (schema, answer.body)
            assert client.complete("x", max_tokens=2).status == 200
        for schema in SCHEMA_BOMBS[:5]:
            response_format = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}
            assert client.complete("x", max_tokens=2, response_format=response_format).status == 400, schema


# ------------------------------------------------------------------------------------------------- keys


@pytest.fixture(scope="module")
def locked(tokenizer: Any) -> Iterator[Client]:
    with running(FakeEngine(tokenizer), api_keys=read_api_keys([KEY, OTHER_KEY])) as client:
        yield client


def test_every_route_but_health_and_the_empty_page_needs_a_key(locked: Client) -> None:
    """CVE-2025-59425. Without a key, a route that does not exist gives the same answer as any other."""
    document = locked.get("/openapi.json", Authorization=f"Bearer {KEY}").json
    routes = [(method.upper(), path) for path, item in document["paths"].items() for method in item]
    assert len(routes) >= 10
    for method, path in [*routes, ("GET", "/openapi.json"), ("GET", "/no/such/route"), ("DELETE", "/v1/models")]:
        answer = locked.send(method, path, {} if method == "POST" else None)
        if path == "/health":
            assert answer.status == 200
        else:
            error = answer.json["error"] if path.startswith("/v1/messages") else answer.error
            assert (answer.status, error["type"]) == (401, "authentication_error"), path
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY},{OTHER_KEY}",
        "Bearer clé-non-ascii",
        "Bearer \xff\xfe",
        "Bearer " + "x" * 10_000,
    ],
)
def test_an_unknown_key_is_a_401(locked: Client, authorization: str) -> None:
    lines = ("GET /v1/models HTTP/1.1", "Host: localhost", f"Authorization: {authorization}")
    assert raw(locked, *lines).startswith(b"HTTP/1.1 401")


def test_each_of_the_keys_is_accepted(locked: Client) -> None:
    for key in (KEY, OTHER_KEY):
        assert locked.get("/v1/models", Authorization=f"Bearer {key}").status == 200
        assert locked.get("/v1/models", Authorization=f"bearer {key}").status == 200


def test_a_key_is_compared_with_all_keys_as_hashes_in_constant_time(
    locked: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare_digest = hmac.compare_digest

    def spy(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return compare_digest(left, right)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    for headers in ({"Authorization": f"Bearer {KEY}"}, {"Authorization": "Bearer x"}, {"x_api_key": KEY}, {}):
        compared.clear()
        locked.get("/v1/models", **headers)
        assert len(compared) == 4, "two keys, for each of the two headers"
        assert {len(value) for pair in compared for value in pair} == {32}


def test_weak_keys_are_refused(tmp_path: Any) -> None:
    for key in ("short", "with a space in it", "nicht-äscii-schlüssel", ""):
        with pytest.raises(UsageError, match="API key 1"):
            read_api_keys([key])
    (tmp_path / "keys").write_text("# ours\n\n")
    with pytest.raises(UsageError, match="no API key"):
        read_api_keys(file=tmp_path / "keys")
    with pytest.raises(StorageError):
        read_api_keys(file=tmp_path / "missing")


# ------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    "error", [RuntimeError("a kernel failed"), MemoryError("out of memory"), None], ids=["kernel", "memory", "NaN"]
)
def test_a_request_that_breaks_a_step_fails_alone(tiny: Engine, error: Exception | None) -> None:
    """CVE-2026-44223, CVE-2026-22773: a kernel error, no memory, and NaN logits."""
    run = tiny._runner.run

    def breaking(works: Any) -> torch.Tensor:
        logits: torch.Tensor = run(works)
        sampled = [work for work in works if work.samples]
        for row, work in enumerate(sampled):
            if work.sequence.request.params.seed == 666:
                if error is not None:
                    raise error
                logits[row] = torch.nan
        return logits

    tiny._runner.run = breaking  # type: ignore[method-assign]
    answers: dict[int, Any] = {}
    with running(tiny) as client:

        def ask(index: int) -> None:
            seed = 666 if index == 3 else index
            answers[index] = client.complete(f"number {index}", seed=seed, max_tokens=30, ignore_eos=True)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {index: answer.status for index, answer in answers.items()} == {
            index: 500 if index == 3 else 200 for index in range(8)
        }
        assert answers[3].error["code"] == "engine_error"
        assert all(answers[index].json["usage"]["completion_tokens"] == 30 for index in range(8) if index != 3)
        assert client.complete(max_tokens=3).status == 200
        assert client.idle()


def test_a_dead_engine_fails_health_and_the_running_requests(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer, seconds=0.01)
    with running(engine) as client:
        stream = client.open_stream(max_tokens=400)
        engine.broken = RuntimeError("a bug")
        rest = b""
        while piece := stream.recv(65536):
            rest += piece
            if b"[DONE]" in rest:
                break
        assert b'"code":"engine_error"' in rest
        assert wait_for(lambda: client.get("/health").status == 503)
        answer = client.complete(max_tokens=2)
        assert (answer.status, answer.error["code"]) == (503, "stopping")


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "json_object"}}], ids=["plain", "grammar"])
def test_a_request_submitted_while_the_engine_dies_is_answered_with_an_error(
    tokenizer: Any, fields: dict[str, Any]
) -> None:
    engine = FakeEngine(tokenizer, seconds=0.3)
    answers: list[Any] = []
    with running(engine) as client:
        stream = client.open_stream(max_tokens=400)
        engine.broken = RuntimeError("a bug")
        ask = threading.Thread(target=lambda: answers.append(client.complete(max_tokens=5, **fields)))
        ask.start()
        ask.join(PATIENCE)
        assert [answer.status for answer in answers] in ([503], [500]), answers
        stream.close()


# ------------------------------------------------------------------------------------------------- numbers

ODD = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), -1, 10**400, float("nan"), float("inf"), -float("inf"), 1e999]),
    st.floats(),
    st.booleans(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.lists(st.integers(-5, 300), max_size=3),
)
NUMBERS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "stream",
    "ignore_eos",
    "echo",
    "stream_options",
    "response_format",
    "prompt",
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(NUMBERS), value=ODD)
def test_odd_values_are_accepted_or_refused_by_name(client: Client, name: str, value: Any) -> None:
    """CVE-2026-21869: whatever the value of a field, the answer is 200 or 400, and 400 names the field."""
    answer = client.complete(**{"prompt": "abc", "max_tokens": 2, name: value})
    assert answer.status in (200, 400), answer.body
    if answer.status == 400 and answer.error["param"] is not None:
        assert answer.error["param"].partition(".")[0].partition("[")[0] in (name, "stream", "min_tokens")
    elif answer.status == 400:
        assert "JSON" in answer.error["message"] or "parsing" in answer.error["message"], answer.body


def test_log_probabilities_of_prompts_are_bounded_over_all_answers(client: Client) -> None:
    """They are computed for every token of every prompt and held in memory together."""
    fields: dict[str, Any] = {"echo": True, "logprobs": 20, "max_tokens": 1}
    refused = client.complete([[1] * 500] * 32, n=2, **fields)
    assert (refused.status, refused.error["param"]) == (400, "logprobs")
    assert "fewer" in refused.error["message"]
    assert client.complete([[1] * 50] * 32, n=2, **fields).status == 200


@pytest.mark.parametrize("value", [True, "1", [1], 10**400, -1.5])
@pytest.mark.parametrize("name", ["temperature", "n", "seed", "max_tokens", "top_k"])
def test_no_other_type_is_converted_to_a_number(client: Client, name: str, value: Any) -> None:
    assert client.complete(**{name: value}).status == 400


# ------------------------------------------------------------------------------------------------- the prefix cache


def test_a_cached_prefix_is_shared_only_by_requests_with_the_same_key_and_salt(tiny: Engine) -> None:
    """CVE-2025-46570: the time to first token must not reveal the prompts of other clients."""
    prompt = "a prompt of several blocks of the cache, which is long enough to be shared with others " * 2

    def cached(client: Client, key: str, **fields: Any) -> int:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1} | fields
        answer = client.post("/v1/completions", body, Authorization=f"Bearer {key}")
        return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    with running(tiny, api_keys=read_api_keys([KEY, OTHER_KEY])) as client:
        assert cached(client, KEY) == 0
        assert cached(client, KEY) > 0
        assert cached(client, OTHER_KEY) == 0
        assert cached(client, KEY, cache_salt="mine") == 0
        assert cached(client, KEY, cache_salt="mine") > 0


# ------------------------------------------------------------------------------------------------- the network


def test_no_url_in_a_request_is_fetched(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2025-6242."""
    resolved: list[Any] = []
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: resolved.append(host) or resolve(host, *rest, **more)
    )
    for part in (
        {"type": "image_url", "image_url": {"url": "http://attacker.example/x.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "text", "text": "x", "url": "http://attacker.example/"},
    ):
        answer = client.chat([part])
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert answer.error["param"].startswith("messages[0].content")
    assert set(resolved) <= {"127.0.0.1"}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("attacker.example", 403),
        ("localhost.attacker.example", 403),
        ("127.0.0.1.attacker.example:8000", 403),
        ("localhost:8000@attacker.example", 403),
        ("192.168.0.1", 403),
        ("", 403),
    ],
)
def test_on_loopback_only_host_names_of_this_machine_are_accepted(client: Client, host: str, status: int) -> None:
    """DNS rebinding, CVE-2024-37032."""
    assert raw(client, "GET /health HTTP/1.1", f"Host: {host}").startswith(f"HTTP/1.1 {status}".encode())


def test_more_host_names_can_be_allowed(tokenizer: Any) -> None:
    with running(FakeEngine(tokenizer), allowed_hosts=("llm.example",)) as client:
        for host, status in (("llm.example", 200), ("localhost", 200), ("other.example", 403)):
            assert raw(client, "GET /health HTTP/1.1", f"Host: {host}").startswith(f"HTTP/1.1 {status}".encode())


def test_pages_of_other_origins_get_no_answer(client: Client) -> None:
    """No CORS headers, and no content type that a foreign page's form can send without a preflight."""
    headers = {"Origin": "https://attacker.example", "Access-Control-Request-Method": "POST"}
    preflight = client.send("OPTIONS", "/v1/completions", headers=headers)
    assert preflight.status == 405
    plain = client.complete(max_tokens=1)
    for answer in (preflight, plain):
        assert not [name for name in answer.headers if name.startswith("access-control")]
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        assert client.send("POST", "/v1/completions", body, {"Content-Type": kind}).status == 415


@pytest.mark.parametrize("name", ["other", "../tiny", "/etc/passwd", "tiny/../tiny", "TINY", "http://x.example/m", ""])
def test_another_model_name_or_a_path_is_a_404(client: Client, name: str) -> None:
    answer = client.complete(model=name)
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert client.post("/tokenize", {"model": name, "prompt": "x"}).status == 404
    if name not in ("", "http://x.example/m"):
        assert client.get(f"/v1/models/{name}").status in (401, 404)


# ------------------------------------------------------------------------------------------------- logs


def test_prompts_and_keys_are_never_logged(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "a-very-secret-prompt"
    caplog.set_level(logging.DEBUG)
    engine = FakeEngine(tokenizer, fails=lambda request: "failed" if request.params.seed == 1 else None)
    with running(engine, api_keys=read_api_keys([KEY])) as client:
        for fields in (
            {},
            {"seed": 1},
            {"temperature": secret},
            {secret: 1},
            {"prompt": [secret, 1]},
            {"stop": [secret]},
        ):
            body = {"model": MODEL, "prompt": secret, "max_tokens": 30} | fields
            client.post("/v1/completions", body, Authorization=f"Bearer {KEY}")
        client.get(f"/v1/models/x?{secret}", Authorization=f"Bearer {KEY}")
        client.get("/v1/models", Authorization=f"Bearer {secret}")
    logged = caplog.text + "".join(capfd.readouterr())
    assert "POST /v1/completions 200" in logged
    assert secret not in logged
    assert KEY not in logged


def test_request_ids_of_clients_are_echoed_if_they_cannot_forge_a_log_line(client: Client) -> None:
    assert client.get("/health", X_Request_Id="trace-01.a:b_C").headers["x-request-id"] == "trace-01.a:b_C"
    for odd in ("a b", "x" * 200, "é", "a\tb", "<script>"):
        echoed = client.send("GET", "/health", headers={"X-Request-Id": odd.encode("latin-1").decode("latin-1")})
        assert echoed.headers["x-request-id"] != odd


def test_the_answer_to_an_unexpected_exception_has_no_details(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> bytes:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr("minifloat.serve.server.metrics.Metrics.text", broken)
    with running(FakeEngine(tokenizer)) as client:
        answer = client.get("/metrics")
        assert (answer.status, answer.error["message"]) == (500, "internal server error")
        assert b"secret" not in answer.body


# ------------------------------------------------------------------------------------------------- disconnects


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_thousand_clients_that_disconnect_leave_nothing_behind(tiny: Engine) -> None:
    """CVE-2026-9540: aborted streams leave no request, no task, no file descriptor and no block of the cache."""
    with running(tiny, max_queue=64) as client:

        def leave(times: int) -> None:
            for _ in range(times):
                client.open_stream(max_tokens=400, prompt="go on and on").close()

        leave(10)
        assert client.idle()
        gc.collect()
        descriptors, threads = _descriptors(), threading.active_count()
        crowd = [threading.Thread(target=leave, args=(125,)) for _ in range(8)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
        assert client.idle()
        assert wait_for(lambda: tiny.kv_usage == 0.0)
        assert wait_for(lambda: not client.server.server_state.tasks)
        assert wait_for(lambda: _descriptors() <= descriptors)
        assert wait_for(lambda: threading.active_count() == threads)
        assert wait_for(lambda: not client.engine._streams)
        counts = client.get("/metrics").body.decode()
        cancelled = next(
            line for line in counts.splitlines() if 'request_success_total{finished_reason="cancelled"}' in line
        )
        assert float(cancelled.split()[-1]) >= 1000
        assert client.complete(max_tokens=5).status == 200


def test_a_client_that_disconnects_without_streaming_is_noticed(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer)
    engine.held = True  # no request ends by itself
    with running(engine) as client:
        body = json.dumps({"model": MODEL, "prompt": "abc", "max_tokens": 500, "n": 4}).encode()
        for _ in range(20):
            with client.connect() as connection:
                head = (
                    f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                connection.sendall(head.encode() + body)
                assert wait_for(lambda: client.engine.running > 0)
            assert client.idle()
