"""The messages of a conversation, put together from the items or blocks in which newer APIs send them."""

from __future__ import annotations

from typing import Any

_TEXTS = ("content", "reasoning_content")


class UnknownCall(ValueError):
    """A result without a call before it."""


class History:
    """Messages as `Conversation` has them, which grow by one text, thinking, call or result at a time.

    What an assistant says, thinks and calls without a result in between is one message, as chat templates expect it.
    Many templates take a system message only at the beginning. A later one joins the user's message or the result
    before it, or else the next one: the prompt of a turn then begins with that of the turn before, whose cached prefix
    it uses.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []  # their texts are lists of pieces
        self._names: dict[str, str] = {}
        self._held: list[str] = []

    def system(self, text: str) -> None:
        if not text:
            return
        if not self._messages or self._last("system"):
            self._message("system")["content"].append(text)
        elif self._last("assistant"):
            self._held.append(text)
        else:
            self._messages[-1]["content"].append(text)

    def user(self, text: str) -> None:
        self._message("user")["content"] += [*self._released(), text]

    def think(self, text: str) -> None:
        self._assistant().setdefault("reasoning_content", []).append(text)

    def say(self, text: str) -> None:
        self._assistant()["content"].append(text)

    def call(self, id: str, name: str, arguments: dict[str, Any]) -> None:
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)
        self._names[id] = name

    def result(self, id: str, text: str) -> None:
        """Add the result of a call."""
        if id not in self._names:
            raise UnknownCall("no call before it has its id")
        result = {"role": "tool", "tool_call_id": id, "name": self._names[id], "content": [text, *self._released()]}
        self._messages.append(result)

    def messages(self) -> list[dict[str, Any]]:
        """Return all messages, whose texts are strings."""
        if self._held:
            self._message("user")["content"] += self._released()
        return [
            {name: "\n".join(value) if name in _TEXTS else value for name, value in message.items()}
            for message in self._messages
        ]

    @property
    def ends_with_text(self) -> bool:
        """Whether the last message is an assistant's text, which an answer may continue."""
        return self._last("assistant") and not self._held and "tool_calls" not in self._messages[-1]

    def _last(self, role: str) -> bool:
        return bool(self._messages) and self._messages[-1]["role"] == role

    def _message(self, role: str) -> dict[str, Any]:
        if not self._last(role):
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]

    def _assistant(self) -> dict[str, Any]:
        if self._held:
            self._message("user")["content"] += self._released()
        return self._message("assistant")

    def _released(self) -> list[str]:
        held, self._held = self._held, []
        return held
