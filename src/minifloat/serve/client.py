"""`minifloat chat`: a conversation in the terminal with `minifloat serve`, or any other server with OpenAI's API.

Answers are streamed; Ctrl-C closes the connection, which makes the server stop generating.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from minifloat.serve.connection import Connection, ServerError

_DATA = b"data: "


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
        """Yield the pieces of an answer. Closing the iterator stops the generation.

        Raises:
            ServerError: If the server cannot be reached or refuses.
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
                    if piece := choice["delta"].get("content"):
                        yield piece


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
    """Show an answer while it streams, and return its text."""
    pieces: list[str] = []
    began = first_token = time.monotonic()
    stream = client.stream(messages)
    try:
        for piece in stream:
            if not pieces:
                first_token = time.monotonic()
            pieces.append(piece)
            write(piece)
    except KeyboardInterrupt:
        write(" (stopped)")
    except ServerError as error:
        write(f"({error})")
    finally:
        stream.close()
    write("\n")
    if stats and len(pieces) > 1:
        rate = (len(pieces) - 1) / max(time.monotonic() - first_token, 1e-9)
        write(f"({first_token - began:.2f} s to the first token, then {rate:.1f} pieces per second)\n")
    return "".join(pieces)
