"""What a client is told when something is wrong: the body that OpenAI's clients know, with the right status.

`{"error": {"message", "type", "param", "code"}}`. Nothing of the request is repeated in it beyond the names of fields,
and nothing of the server's inside: an exception that nobody expected is a plain 500 here and a traceback in the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from minifloat.errors import ContextLengthError, EngineStopped, KernelUnavailable, MinifloatError, QueueFull, UsageError

#: Seconds after which a client may try again when the queue is full or the server is going away.
RETRY_AFTER = 1

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_FIELD = re.compile(r"^([a-z_]+):")  #: messages of the engine begin with the parameter at fault
#: What the engine and the API call differently.
_API_NAMES = {"json_schema": "response_format", "include_stop": "include_stop_str_in_output"}


class ErrorDetail(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class FieldError(ValueError):
    """A complaint about one field that needs the others to be judged."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class APIError(HTTPException):
    """An answer other than success.

    An `HTTPException`, for FastAPI lets nothing else through that is raised while it reads a body.

    Args:
        status: HTTP status.
        message: For a human: what was expected, what was found, the cure.
        param: The field of the request that is at fault.
        code: For a program.
        headers: Added to the response.
    """

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
        """The body of the answer; also what a stream ends with that fails on its way."""
        kind = _TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return ErrorBody(error=ErrorDetail(message=self.detail, type=kind, param=self.param, code=self.code))

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body.model_dump(), status_code=self.status_code, headers=self.headers)


def invalid(message: str, param: str | None = None) -> APIError:
    """The request can never work."""
    return APIError(400, message, param=param)


def from_http(error: HTTPException) -> APIError:
    """The answer where Starlette or FastAPI refuse: no such path, no such method, a body that cannot be parsed."""
    return error if isinstance(error, APIError) else APIError(error.status_code, error.detail, headers=error.headers)


def from_minifloat(error: MinifloatError) -> APIError:
    """The answer to an error that the engine raised on purpose."""
    if isinstance(error, QueueFull):
        headers = {"retry-after": str(RETRY_AFTER)}
        return APIError(503, f"the server is busy: {error}", code="queue_full", headers=headers)
    if isinstance(error, EngineStopped):
        return APIError(503, str(error), code="stopping", headers={"retry-after": str(RETRY_AFTER)})
    if isinstance(error, ContextLengthError):
        return APIError(400, str(error), param="prompt", code="context_length_exceeded")
    if isinstance(error, UsageError):
        found = _FIELD.match(str(error))
        return invalid(str(error), _API_NAMES.get(found[1], found[1]) if found else None)
    if isinstance(error, KernelUnavailable):
        return invalid(str(error), "response_format")  # what JSON output needs is not installed
    return APIError(500, str(error))


def from_validation(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """The answer to a body that does not have the shape of a request; pydantic's first complaint is told.

    Values are not repeated: they may be long, and they are the client's own.
    """
    first = errors[0]
    path = list(first["loc"][1:])
    if first["type"] == "json_invalid":
        return invalid("the body is not valid JSON")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return invalid(f"{cause.field}: {cause}", cause.field)
    if not path:
        return invalid("the body must be a JSON object; send it with Content-Type: application/json")
    names = [str(part) for i, part in enumerate(path) if i == 0 or part != path[i - 1]]  # a tag is named like its field
    param = names[0] + "".join(f"[{name}]" if name.isdigit() else f".{name}" for name in names[1:])
    if first["type"] == "extra_forbidden":
        return invalid(f"unknown field {param!r}; fields that this server does not know are refused", param)
    if first["type"] == "missing":
        return invalid(f"the field {param!r} is missing", param)
    return invalid(f"{param}: {first['msg'].removeprefix('Value error, ')}", param)
