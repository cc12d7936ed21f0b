"""Error answers: OpenAI's body `{"error": {"message", "type", "param", "code"}}` with the right status, or Anthropic's.

The body repeats nothing of the request but names of fields, and shows nothing of the server's internals: an unexpected
exception is a plain 500 for the client and a traceback in the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from minifloat.errors import ContextLengthError, EngineStopped, KernelUnavailable, MinifloatError, QueueFull, UsageError

#: Seconds after which a client may try again when the queue is full or the server is going away.
RETRY_AFTER = 1

#: Error of a text with half of a surrogate pair, which JSON can escape. It is no character: neither UTF-8, nor
#: tokenizers, nor answers can contain it.
NOT_UNICODE = "expected Unicode; found half of a surrogate pair, which has no UTF-8"

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
#: Of Anthropic's API: its paths, and its types of errors; 529 is the status of a server with too much to do.
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 504: "timeout_error", 529: "overloaded_error"}
#: Code by which Anthropic's clients know that they have to send the whole conversation.
NO_THREADS = "thread_unsupported_request"
_FIELD = re.compile(r"^([a-z_]+):")  #: messages of the engine begin with the parameter at fault
#: Parameters of the engine that the API names differently.
_API_NAMES = {
    "json_schema": "response_format",
    "include_stop": "include_stop_str_in_output",
    "forbidden": "bad_words",
}


class ErrorDetail(BaseModel):
    """The content of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every error answer."""

    error: ErrorDetail


class AnthropicError(BaseModel):
    """The content of an error of Anthropic's API."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorBody(BaseModel):
    """The body of every error answer of Anthropic's API."""

    type: Literal["error"] = "error"
    error: AnthropicError


class FieldError(ValueError):
    """An invalid combination of fields, reported under one of them."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


# FastAPI passes on no other exception than `HTTPException` that is raised while it reads a body.
class APIError(HTTPException):
    """An error answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code

    @property
    def body(self) -> ErrorBody:
        """The body of the answer, and the last event of a stream that fails."""
        kind = _TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return ErrorBody(error=ErrorDetail(message=self.detail, type=kind, param=self.param, code=self.code))

    @property
    def anthropic_body(self) -> AnthropicErrorBody:
        """The same for Anthropic's API."""
        status = self._anthropic_status
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        # clients look for these words to shorten a conversation
        message = f"prompt is too long: {self.detail}" if self.code == "context_length_exceeded" else self.detail
        error = AnthropicError(type=kind, message=message)
        if self.code == NO_THREADS:
            error.details = {"error_code": NO_THREADS, "unsupported": ["thread"]}
        return AnthropicErrorBody(type="error", error=error)

    @property
    def _anthropic_status(self) -> int:
        return 529 if self.code in ("queue_full", "too_many_connections") else self.status_code

    def response(self, path: str) -> JSONResponse:
        """Return the answer to a request for a path, in the form of its API."""
        if path.startswith(_ANTHROPIC_PATH):
            return JSONResponse(
                self.anthropic_body.model_dump(exclude_unset=True), self._anthropic_status, headers=self.headers
            )
        return JSONResponse(self.body.model_dump(), status_code=self.status_code, headers=self.headers)


def invalid(message: str, param: str | None = None) -> APIError:
    """Return a 400 for a request that can never succeed."""
    return APIError(400, message, param=param)


def from_http(error: HTTPException) -> APIError:
    """Return the answer to an error of Starlette or FastAPI: unknown path or method, body that cannot be parsed."""
    return error if isinstance(error, APIError) else APIError(error.status_code, error.detail, headers=error.headers)


def from_minifloat(error: MinifloatError) -> APIError:
    if isinstance(error, QueueFull):
        headers = {"retry-after": str(RETRY_AFTER)}
        return APIError(503, f"the server is busy: {error}", code="queue_full", headers=headers)
    if isinstance(error, EngineStopped):
        return APIError(503, str(error), code="stopping", headers={"retry-after": str(RETRY_AFTER)})
    if isinstance(error, ContextLengthError):
        return APIError(400, str(error), param=_field(error), code="context_length_exceeded")
    if isinstance(error, UsageError):
        return invalid(str(error), _field(error))
    if isinstance(error, KernelUnavailable):
        return invalid(str(error), "response_format")  # the package for JSON output is not installed
    return APIError(500, str(error))


def _field(error: UsageError) -> str | None:
    match = _FIELD.match(str(error))
    return _API_NAMES.get(match[1], match[1]) if match else None


def from_validation(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """Return the answer to a body that fails validation, which reports pydantic's first error."""
    # The answer repeats no values, which may be long or secret.
    first = errors[0]
    path = list(first["loc"][1:])
    if first["type"] == "json_invalid":
        return invalid("the body is not valid JSON")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return invalid(f"{cause.field}: {cause}", cause.field)
    if not path and first["type"] == "string_unicode":
        return invalid(f"the name of a field: {NOT_UNICODE}")
    if not path:
        return invalid("the body must be a JSON object; send it with Content-Type: application/json")
    # pydantic repeats the name of a union's tag, and names the alternatives of a text or a list
    names = [
        str(part) for i, part in enumerate(path) if (i == 0 or part != path[i - 1]) and part not in ("str", "list")
    ]
    param = names[0] + "".join(f"[{name}]" if name.isdigit() else f".{name}" for name in names[1:])
    if first["type"] == "extra_forbidden":
        return invalid(f"unknown field {param!r}; fields that this server does not know are refused", param)
    if first["type"] == "string_unicode":
        return invalid(f"{param}: {NOT_UNICODE}", param)
    if first["type"] == "missing":
        return invalid(f"the field {param!r} is missing", param)
    return invalid(f"{param}: {first['msg'].removeprefix('Value error, ')}", param)
