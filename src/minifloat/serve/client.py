"""`minifloat chat`: a conversation in the terminal with `minifloat serve`, or any other server with OpenAI's API.

Answers are streamed; Ctrl-C closes the connection, which makes the server stop generating. Only the standard library is
used, so that `chat` starts at once and needs no torch.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from minifloat.errors import StorageError, UsageError

_TIMEOUT = 600.0  #: seconds without a byte
_DATA = b"data: "


class ServerError(StorageError):
    """The server cannot be reached or refuses the request."""

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


@dataclass
class ChatClient:
    """Talks to a server.

    Args:
        url: Address of the server, with or without ``/v1`` at its end.
        api_key: API key of the server.
        model: Name of the model; None: the first that the server lists.
        sampling: Sampling fields of the requests, by their names in the API.
    """

    url: str
    api_key: str | None = None
    model: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._server = Connection(self.url, self.api_key)

    def find_model(self) -> str:
        """Return the model's name, which the first call requests from the server.

        Raises:
            ServerError: If the server cannot be reached or refuses.
        """
        if self.model is None:
            self.model = str(self._server.listed_model()["id"])
        return self.model

    def stream(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        """Yield the pieces of an answer, without its thinking. Closing the iterator stops the generation.

        Raises:
            ServerError: If the server cannot be reached or refuses.
        """
        with contextlib.closing(self.pieces(messages)) as pieces:
            for text, is_thinking in pieces:
                if not is_thinking:
                    yield text

    def pieces(self, messages: list[dict[str, str]]) -> Generator[tuple[str, bool], None, None]:
        """Yield the pieces of an answer and of the thinking before it, each with whether it is thinking.

        Raises:
            ServerError: As `stream`.
        """
        body = {"model": self.find_model(), "messages": messages, "stream": True, **self.sampling}
        with self._server.request("POST", "/v1/chat/completions", body) as response:
            for line in response:
                if not line.startswith(_DATA) or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line.removeprefix(_DATA))
                if "error" in event:
                    raise ServerError(event["error"]["message"])
                for choice in event["choices"]:
                    for name, is_thinking in (("reasoning_content", True), ("content", False)):
                        if piece := choice["delta"].get(name):
                            yield piece, is_thinking


def chat(
    client: ChatClient,
    *,
    system: str | None = None,
    stats: bool = False,
    read: Callable[[str], str] = input,
    write: Callable[[str], None] = lambda text: print(text, end="", flush=True),
) -> None:
    """Read lines and show the answers, until the end of the input or /quit.

    Args:
        client: Client of the server.
        system: System message: instructions to the model.
        stats: Whether to show the speed of each answer.
        read: Shows a prompt and returns a line; raises EOFError at the end.
        write: Shows a piece of text.

    Raises:
        ServerError: If the server cannot be reached at the start. Later errors are shown.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it lets `input` edit lines
    write(f"{client.find_model()}: /quit ends, /reset forgets, /system TEXT instructs; Ctrl-C stops an answer\n")
    messages = _beginning(system)
    while True:
        try:
            line = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return
        if command == "/reset":
            messages = _beginning(system)
            write("(forgotten)\n")
        elif command == "/system":
            system = rest.strip() or None
            messages = _beginning(system)
            write("(a new conversation)\n")
        elif line.startswith("/"):
            write(f"(unknown command {command}; there are /quit, /reset and /system)\n")
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _show(client, messages, stats=stats, write=write)
            if answer:
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()  # chat templates require question and answer in turn


def _beginning(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _show(client: ChatClient, messages: list[dict[str, str]], *, stats: bool, write: Callable[[str], None]) -> str:
    """Show an answer while it streams, its thinking in parentheses, and return its text."""
    pieces: list[str] = []
    count, thinks = 0, False
    began = first_token = time.monotonic()
    stream = client.pieces(messages)
    try:
        for piece, is_thinking in stream:
            if not count:
                first_token = time.monotonic()
            count += 1
            if is_thinking != thinks:
                write("(" if is_thinking else ")\n")
                thinks = is_thinking
            if not is_thinking:
                pieces.append(piece)
            write(piece)
    except KeyboardInterrupt:
        write(" (stopped)")
    except ServerError as error:
        write(f"({error})")
    finally:
        stream.close()
    write(")\n" if thinks else "\n")
    if stats and count > 1:
        rate = (count - 1) / max(time.monotonic() - first_token, 1e-9)
        write(f"({first_token - began:.2f} s to the first token, then {rate:.1f} pieces per second)\n")
    return "".join(pieces)
