"""`Connection`: requests to a server with OpenAI's API.

It uses the standard library only, so that `minifloat chat` starts at once and needs no torch.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from minifloat.errors import StorageError, UsageError

_TIMEOUT = 600.0  #: seconds without a byte


class ServerError(StorageError):
    """The server cannot be reached or refuses the request.

    Attributes:
        status: HTTP status of the answer; None if there is no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)


class Connection:
    """Sends requests; several threads may do so at a time."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"expected a URL such as http://127.0.0.1:8000, got {url!r}")
        self.url = url
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._key = api_key

    def listed_model(self, name: str | None = None) -> dict[str, Any]:
        """Return what the server lists about a model (``/v1/models``)."""
        models = self.json("GET", "/v1/models").get("data")
        if not models:
            raise ServerError(f"{self.url}: the server has no model")
        fitting = [dict(one) for one in models if name in (None, one["id"])]
        return fitting[0] if fitting else {"id": name}

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the answer, a JSON object."""
        with self.request(method, path, body) as response:
            text = response.read()
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise ServerError(f"{self.url}{path}: the answer is not JSON: {error}") from error
        if not isinstance(answer, dict):
            raise ServerError(f"{self.url}{path}: the answer is not a JSON object")
        return answer

    @contextlib.contextmanager
    def request(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        """Send a request and give the answer, whose body may still come."""
        connection_class = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = connection_class(self._host, self._port, timeout=_TIMEOUT)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        try:
            connection.request(method, self._prefix + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ServerError(_reason(response), response.status)
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}: {error}; is `minifloat serve` running there?") from error
        finally:
            connection.close()


def _reason(response: http.client.HTTPResponse) -> str:
    body = response.read()
    try:
        return f"{response.status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status} {response.reason}"
