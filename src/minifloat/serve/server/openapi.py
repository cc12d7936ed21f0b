"""What the OpenAPI document says beyond the types of requests and answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from minifloat.serve.api.fields import TOKEN_TITLE
from minifloat.serve.server.errors import ErrorBody

_MEANINGS = {
    400: "The request can never work; `param` names the field.",
    401: "No valid API key.",
    403: "A host name that this server does not answer to.",
    404: "An unknown model, or an unknown path.",
    408: "The request took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    500: "The engine failed on this request.",
    503: "The queue is full, or the server is stopping; see Retry-After.",
    504: "Not finished in time.",
    529: "The queue is full; see Retry-After.",
}
_GUARDED = (401, 403)
_WITH_BODY = (*_GUARDED, 400, 404, 408, 413, 415)


def failures(*statuses: int, body: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": body, "description": _MEANINGS[status]} for status in statuses}


def text(media_type: str, description: str) -> dict[int | str, dict[str, Any]]:
    success: dict[int | str, dict[str, Any]] = {
        200: {"description": description, "content": {media_type: {"schema": {"type": "string"}}}}
    }
    return success | failures(*_GUARDED)


def answers(
    model: type[BaseModel], *, with_body: bool = False, error: type[BaseModel] = ErrorBody
) -> dict[int | str, dict[str, Any]]:
    success: dict[int | str, dict[str, Any]] = {200: {"model": model}}
    return success | failures(*(_WITH_BODY if with_body else _GUARDED), body=error)


def streamed(model: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    example = f"data: ({chunk.__name__} as JSON)\n\ndata: [DONE]\n\n"
    return _streamed(model, example, ErrorBody)


def streamed_events(model: type[BaseModel], *, error: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """Return the same for a stream whose events have names."""
    return _streamed(model, "event: (type)\ndata: (event as JSON)\n\n", error)


def _streamed(model: type[BaseModel], example: str, error: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    content = {"text/event-stream": {"example": example}}
    return {200: {"model": model, "content": content}} | failures(*_WITH_BODY, 503, 504, body=error)


def describe(document: dict[str, Any], name: str, vocab_size: int) -> None:
    """Write the served model's name and its largest token id into the document."""
    for schema in document["components"]["schemas"].values():
        field = schema.get("properties", {}).get("model")
        if field is not None and schema["title"].endswith("Request"):
            optional = [{"type": "null"}] if "anyOf" in field else []
            field.clear()
            field |= {"title": "Model", "anyOf": [{"enum": [name]}, *optional]}
        _bound_tokens(schema, vocab_size)
    for parameter in document["paths"]["/v1/models/{name}"]["get"]["parameters"]:
        parameter["schema"] = {"title": "Name", "enum": [name]}


def _bound_tokens(schema: Any, vocab_size: int) -> None:
    if isinstance(schema, dict):
        if schema.get("title") == TOKEN_TITLE:
            schema["maximum"] = vocab_size - 1
        for value in schema.values():
            _bound_tokens(value, vocab_size)
    elif isinstance(schema, list):
        for value in schema:
            _bound_tokens(value, vocab_size)
