"""`Compiled`: a grammar, its process and its texts; and the errors that both can end with."""

from __future__ import annotations

import logging
import signal
import socket
from collections import deque
from concurrent.futures import Future

from minifloat.engine.grammar import worker
from minifloat.engine.grammar.limits import GrammarLimits
from minifloat.engine.grammar.state import GrammarState
from minifloat.errors import MinifloatError, UsageError

_LOG = logging.getLogger(__name__)


class Compiled:
    """A grammar and its process.

    Attributes:
        first: Mask of the first token; None: not yet.
        connection: Connection to the process; None: it has not been started, or has ended.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.ready: Future[None] = Future()
        self.ready.set_running_or_notify_cancel()  # one that stops waiting must not cancel it for the others
        self.first: bytes | None = None
        self.states: dict[int, GrammarState] = {}
        self.asked: deque[int] = deque()
        self.began: set[int] = set()
        self.connection: socket.socket | None = None
        self.process = self.pid = self.data = 0

    def ask(self, state: GrammarState) -> None:
        """Send the last token of a text, or all its tokens if the process does not know the text."""
        if self.connection is None or not self.ready.done():
            return  # all tokens are sent when the grammar is compiled
        kind, tokens = worker.ADD, state.tokens[-1:]
        if state.number not in self.began:
            kind, tokens = worker.REPLAY, state.tokens
            self.began.add(state.number)
        self.asked.append(state.number)
        self.send(worker.HEADER.pack(kind, state.number), *map(worker.TOKEN.pack, tokens))

    def send(self, *parts: bytes) -> None:
        """Send a message. A process that has ended does not receive it; the reader notices."""
        if self.connection is not None:
            try:
                worker.send_frame(self.connection, *parts)
            except OSError as error:
                _LOG.debug("a grammar's process does not read: %s", error)

    def note(self, number: int, kind: bytes, content: bytes) -> None:
        """Note an answer of the process about a text."""
        is_last = self.asked.count(number) == 1  # else a token was added meanwhile
        if kind != worker.ADDED or content != b"\0":
            self.asked.popleft()
        state = self.states.get(number)
        if state is None or not is_last:
            return
        if kind == worker.MASK:
            state.mask = content
        elif kind == worker.ADDED:
            state.added, state.done = True, content == b"\1"
        else:
            state.error = grammar_error(content.decode(errors="replace"))

    def fail(self, error: MinifloatError) -> None:
        """Let all texts fail."""
        for state in self.states.values():
            state.error = error if isinstance(error, UsageError) else grammar_error(str(error))
        if not self.ready.done():
            self.ready.set_exception(error)


def grammar_error(text: str) -> UsageError:
    """Return the error of a grammar; llguidance adds lines about its own state."""
    if text.startswith("NoExtension"):
        text = "no text follows this grammar; a $ref may refer to itself, or rules may exclude each other"
    return UsageError(f"response_format: {text.splitlines()[0][:400] if text else 'the grammar cannot be used'}")


def why_ended(status: int, limits: GrammarLimits) -> str:
    """Say why a process has ended."""
    if status == -signal.SIGPROF:
        return f"the grammar took more than {limits.step_seconds} s for one token; simplify it"
    if status in (-signal.SIGABRT, worker.OUT_OF_MEMORY):
        return f"the grammar took more than {limits.memory >> 20} MiB, or is one that llguidance fails on; simplify it"
    return f"the process of the grammar has ended with status {status}; llguidance fails on the grammar"
