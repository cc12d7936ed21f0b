"""`Grammars`: the compiled grammars of an engine, each in a process of its own.

Equal grammars share a process and its compilation. If a process computes for too long or takes too much memory, the
system ends it: that is an error of the text it was computing, and the other texts of the grammar continue in a new
process. Processes that no text needs are kept for the next request if they are few and small.
"""

from __future__ import annotations

import json
import signal
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import Any

from minifloat.engine.grammar import worker
from minifloat.engine.grammar.compiled import Compiled, grammar_error, why_ended
from minifloat.engine.grammar.limits import GrammarLimits
from minifloat.engine.grammar.processes import Forker, Reader
from minifloat.engine.grammar.rules import Grammar
from minifloat.engine.grammar.state import GrammarState
from minifloat.errors import KernelUnavailable, MinifloatError, QueueFull, UsageError
from minifloat.model.runtime.file_tokenizer import FileTokenizer


class Grammars:
    """Compiles grammars for one tokenizer."""

    def __init__(self, tokenizer: Any, vocab: int, end_tokens: list[int], limits: GrammarLimits | None = None) -> None:
        self._tokenizer, self._vocab, self._end_tokens = tokenizer, vocab, end_tokens
        self.limits = limits or GrammarLimits()
        self._answers = threading.Condition()
        self._starting = threading.Lock()
        self._forker: Forker | None = None
        self._reader: Reader | None = None
        self._compiled: dict[str, Compiled] = {}  # the one that was used last is the last
        self._open: list[Forker | Reader] = []
        self._finalizer = weakref.finalize(self, _close, self._open)
        self._to_compile: deque[Compiled] = deque()
        self._compiling: list[Compiled] = []
        self._homes: dict[int, Compiled] = {}  # by the number of the text
        self._numbers = 0

    def __len__(self) -> int:
        """Number of processes of grammars."""
        return len(self._compiled)

    def prepare(self) -> None:
        """Start the process that reads the tokenizer, which takes a second for a large vocabulary.

        Any thread may call this.
        """
        with self._starting:
            self._running()

    def begin(self, grammar: Grammar) -> GrammarState:
        """Return the state of a grammar before the first token; the grammar is compiled meanwhile (`ready`).

        Any thread may call this.
        """
        with self._answers:
            compiled = self._compiled.pop(grammar.source, None)
            is_new = compiled is None
            if compiled is None:
                self._make_room()
                compiled = Compiled(grammar.source)
            self._compiled[grammar.source] = compiled
            self._numbers += 1
            state = GrammarState(self, self._numbers, compiled.ready)
            state.mask = compiled.first
            compiled.states[state.number] = state
            self._homes[state.number] = compiled
        if is_new:
            try:
                self._start(compiled)
            except MinifloatError as error:
                self._forget(compiled, error)
                raise
        return state

    def wait(self, states: Iterable[GrammarState], seconds: float, *, until_added: bool = False) -> None:
        """Wait until the next tokens of texts are known, or seconds have passed."""
        with self._answers:
            waited = [state for state in states if not state.known]
            self._answers.wait_for(
                lambda: all(state.known or (until_added and state.added) for state in waited), seconds
            )

    def wait_for_any(self, states: Collection[GrammarState], seconds: float) -> None:
        """Wait until the next token of any text is known, or seconds have passed."""
        with self._answers:
            self._answers.wait_for(lambda: any(state.known for state in states), seconds)

    def add(self, state: GrammarState, token: int) -> None:
        """Advance a text by a token; the answer comes later."""
        with self._answers:
            state.tokens.append(token)
            state.mask, state.added = None, False
            if (compiled := self._homes.get(state.number)) is not None:
                compiled.ask(state)

    def close_state(self, state: GrammarState) -> None:
        """Forget a text."""
        with self._answers:
            compiled = self._homes.pop(state.number, None)
            if compiled is None:
                return
            compiled.states.pop(state.number, None)
            if state.number in compiled.began:
                compiled.began.discard(state.number)
                compiled.send(worker.HEADER.pack(worker.DROP, state.number))
            if not compiled.states and self._reader is not None:
                self._reader.do(self._tidy)

    def close(self) -> None:
        """End all processes."""
        with self._starting, self._answers:
            gone, self._compiled = list(self._compiled.values()), {}
            for compiled in gone:
                compiled.connection = None
                compiled.fail(UsageError("response_format: the engine has been closed"))
            self._answers.notify_all()
        _close(self._open)
        self._forker = self._reader = None

    # ------------------------------------------------------------------------------------------ processes

    def _make_room(self) -> None:
        """Forget a grammar that no text needs, if there are too many."""
        if len(self._compiled) < self.limits.processes:
            return
        idle = next((each for each in self._compiled.values() if not each.states and each.ready.done()), None)
        if idle is None:
            raise QueueFull(f"{self.limits.processes} different grammars are at work already; try again later")
        del self._compiled[idle.source]
        assert self._reader is not None
        self._reader.do(lambda: self._end(idle))

    def _start(self, compiled: Compiled) -> None:
        """Start the process of a grammar, and let it compile."""
        with self._starting:
            for attempt in range(2):
                forker, reader = self._running()
                try:
                    number, pid, connection = forker.fork()
                    break
                except (OSError, EOFError) as error:  # somebody has ended it
                    self._open.remove(forker)
                    forker.close()
                    self._forker = None
                    if attempt:
                        raise KernelUnavailable(f"JSON output: no process can be started: {error}") from error
        compiled.process, compiled.pid, compiled.connection = number, pid, connection
        compiled.data = _data(pid)
        receive = weakref.WeakMethod(self._receive)  # the thread must not keep a forgotten engine alive

        def receive_message(message: bytes | None) -> None:
            if (method := receive()) is not None:
                method(compiled, message)

        reader.read(connection, receive_message)
        with self._answers:
            self._to_compile.append(compiled)
            self._compile_next()

    def _compile_next(self) -> None:
        """Let the processes compile, some at a time."""
        self._compiling = [each for each in self._compiling if each.connection is not None and not each.ready.done()]
        while self._to_compile and len(self._compiling) < self.limits.compiling:
            compiled = self._to_compile.popleft()
            compiled.send(compiled.source.encode())
            self._compiling.append(compiled)

    def _running(self) -> tuple[Forker, Reader]:
        """Return the process that forks and the thread that reads; start them if need be."""
        if self._forker is None:
            self._forker = Forker(self._settings())
            self._open.append(self._forker)
        if self._reader is None:
            self._reader = Reader()
            self._open.append(self._reader)
        return self._forker, self._reader

    def _settings(self) -> dict[str, Any]:
        """Return what `worker.main` receives."""
        tokenizer = self._tokenizer
        own = isinstance(tokenizer, FileTokenizer)
        backend = tokenizer.backend if own else getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise KernelUnavailable("JSON output needs a fast tokenizer, which this model does not have")
        text = backend.to_str()
        if backend.padding or backend.truncation:
            text = json.dumps(json.loads(text) | {"padding": None, "truncation": None})
        end = self._end_tokens or _as_list(tokenizer.eos_token_id)
        return {"tokenizer": text, "vocab": self._vocab, "end_tokens": end, **asdict(self.limits)}

    def _receive(self, compiled: Compiled, message: bytes | None) -> None:
        """Take a message of a process, or None when it has ended; called by the reader."""
        if message is None:
            self._ended(compiled)
            return
        kind, number = worker.HEADER.unpack_from(message)
        content = message[worker.HEADER.size :]
        if number == 0 and kind == worker.ERROR:
            self._forget(compiled, grammar_error(content.decode(errors="replace")))
            self._end(compiled)
            return
        with self._answers:
            if number == 0:
                compiled.first = content
                compiled.ready.set_result(None)
                self._compile_next()
                for state in compiled.states.values():
                    if state.tokens:
                        compiled.ask(state)
                    else:
                        state.mask = content
            else:
                compiled.note(number, kind, content)
            self._answers.notify_all()

    def _ended(self, compiled: Compiled) -> None:
        """Note that a process has ended: by its limits, by a fault of llguidance, or by a third party."""
        forker = self._forker
        status = forker.end(compiled.process) if forker is not None else -signal.SIGKILL
        error = grammar_error(why_ended(status, self.limits))
        compiled.connection = None
        if not compiled.ready.done():
            self._forget(compiled, error)
            return
        with self._answers:
            culprit = compiled.states.pop(compiled.asked[0], None) if compiled.asked else None
            if culprit is not None:
                culprit.error = error
            self._answers.notify_all()
            if self._compiled.get(compiled.source) is not compiled:
                return
            if not compiled.states:
                del self._compiled[compiled.source]
                return
            successor = self._compiled[compiled.source] = Compiled(compiled.source)
            successor.states = compiled.states
            self._homes |= dict.fromkeys(successor.states, successor)
        try:
            self._start(successor)
        except MinifloatError as problem:
            self._forget(successor, problem)

    def _forget(self, compiled: Compiled, error: MinifloatError) -> None:
        """Let all texts of a grammar fail."""
        with self._answers:
            if self._compiled.get(compiled.source) is compiled:
                del self._compiled[compiled.source]
            compiled.fail(error)
            self._compile_next()
            self._answers.notify_all()

    def _tidy(self) -> None:
        """End the processes that no text needs, if they are many or large; called by the reader."""
        with self._answers:
            idle = [compiled for compiled in self._compiled.values() if not compiled.states]
            extra = len(idle) - self.limits.idle
            gone = [
                compiled
                for index, compiled in enumerate(idle)
                if index < extra or not compiled.ready.done() or self._is_large(compiled)
            ]
            for compiled in gone:
                del self._compiled[compiled.source]
        for compiled in gone:
            self._end(compiled)

    def _is_large(self, compiled: Compiled) -> bool:
        return _data(compiled.pid) - compiled.data > self.limits.idle_memory

    def _end(self, compiled: Compiled) -> None:
        """End a process; called by the reader."""
        connection, compiled.connection = compiled.connection, None
        if connection is not None and self._reader is not None:
            self._reader.stop(connection)
            if self._forker is not None:
                self._forker.end(compiled.process)
        with self._answers:
            self._compile_next()


def _data(pid: int) -> int:
    """Return the bytes of a process's own memory; 0 if the system does not tell."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
    except OSError:
        return 0


def _as_list(token: int | None) -> list[int]:
    return [] if token is None else [token]


def _close(parts: list[Forker | Reader]) -> None:
    while parts:
        parts.pop().close()
