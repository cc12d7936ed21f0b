"""Lone surrogates in requests: a 400 that names the field, never a 500."""

from __future__ import annotations

from typing import Any

import pytest
from serving import MODEL, Client

HALF = "a\ud800b"


def _messages(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": content}]}


def _schema(schema: Any) -> dict[str, Any]:
    return {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": HALF}, "prompt"),
        ("/v1/completions", {"prompt": ["x", HALF]}, "prompt"),
        ("/v1/completions", {"prompt": "x", "user": HALF}, "user"),
        ("/v1/completions", {"prompt": "x", HALF: 1}, None),
        ("/v1/completions", _schema({"enum": [HALF]}), "response_format.json_schema.schema"),
        ("/v1/completions", _schema({"properties": {HALF: {}}}), "response_format.json_schema.schema"),
        ("/v1/chat/completions", _messages(HALF), "messages[1].content"),
        ("/v1/chat/completions", _messages([{"type": "text", "text": HALF}]), "messages[1].content"),
        ("/tokenize", {"prompt": HALF}, "prompt"),
        ("/tokenize", _messages("\udfff"), "messages[1].content"),
    ],
)
def test_a_lone_surrogate_is_a_400_that_names_the_field(
    client: Client, path: str, body: dict[str, Any], field: str | None
) -> None:
    answer = client.post(path, {"model": MODEL} | body)
    assert (answer.status, answer.error["param"]) == (400, field), answer.body
    assert "half of a surrogate pair" in answer.error["message"]


def test_a_surrogate_in_the_bytes_of_a_body_is_a_400(client: Client) -> None:
    """Python's JSON parser accepts the three bytes of a surrogate, which are no UTF-8."""
    body = b'{"model": "%s", "prompt": "\xed\xa0\x80"}' % MODEL.encode()
    answer = client.send("POST", "/v1/completions", body)
    assert (answer.status, answer.error["param"]) == (400, "prompt")


def test_a_whole_pair_is_a_character(client: Client) -> None:
    body = b'{"model": "%s", "prompt": "\\ud83d\\ude00", "max_tokens": 4}' % MODEL.encode()
    assert client.send("POST", "/v1/completions", body).status == 200
