"""The program that runs llguidance: a process that makes processes, one for each grammar.

llguidance counts steps ("fuel"), not seconds or bytes: ``{"type": "string", "pattern": "^a{1000000000}$"}`` takes
seconds and hundreds of megabytes within its default limits, and with other options it does not end. A thread cannot be
stopped, a process can. `main` reads the tokenizer once and then forks for each grammar, so that a grammar begins at
once and shares the tokenizer's memory. The kernel ends a process of a grammar that computes for too long at a time
(an interval timer of processor time) or takes too much memory (a resource limit); its memory is then free again.
The processes have the lowest priority, so that they compute in the time that the engine leaves.

The file runs by its path, because the packages around it import torch. It must import the standard library and
llguidance only.

Messages are little-endian, in frames of 4 bytes of length (`send_frame`). From the engine to a grammar's process:

- the grammar, once;
- id, tokens: a new text, which begins with the tokens (`REPLAY`);
- id, token: the text continues (`ADD`);
- id: the text has ended (`DROP`).

Back: kind, id and what the kind says. After the grammar there is one `MASK` or `ERROR`; after `REPLAY` and `ADD` there
is `ADDED`, and then `MASK` or `ERROR` unless no token can follow.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from typing import Any

REPLAY, ADD, DROP = b"R", b"A", b"D"
MASK, ADDED, ERROR = b"M", b"S", b"E"
#: Header of a message: kind, id of the text.
HEADER = struct.Struct("<cI")
TOKEN = struct.Struct("<I")
_LENGTH = struct.Struct("<I")
#: Control messages to `main`: kind, number of the process. Back comes the id of the process, or its exit status.
FORK, END = b"F", b"E"
CONTROL = struct.Struct("<cI")
ANSWER = struct.Struct("<i")
#: Exit status of a process whose memory ran out in Python.
OUT_OF_MEMORY = 77


def send_frame(connection: socket.socket, *parts: bytes) -> None:
    """Send a message of several parts."""
    connection.sendall(b"".join((_LENGTH.pack(sum(map(len, parts))), *parts)))


def receive_frame(connection: socket.socket) -> bytes:
    """Return the next message."""
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    return receive_exactly(connection, length)


def receive_exactly(connection: socket.socket, length: int) -> bytes:
    """Return the next `length` bytes."""
    received = bytearray()
    while len(received) < length:
        piece = connection.recv(length - len(received))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


class _Limits:
    """Processor time of one grammar."""

    def __init__(self, step_seconds: float, seconds: float, seconds_per_token: float) -> None:
        self._step_seconds, self._most, self._per_token = step_seconds, seconds, seconds_per_token
        self._left = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._step_seconds)
        self._started = time.process_time()

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._left += self._started - time.process_time()

    def earn(self) -> None:
        """Add what one token adds."""
        self._left = min(self._left + self._per_token, self._most)

    @property
    def spent(self) -> bool:
        """Whether no time is left."""
        return self._left <= 0


class _Texts:
    """The texts of one grammar."""

    def __init__(self, connection: socket.socket, tokenizer: Any, settings: dict[str, Any]) -> None:
        import llguidance

        self._connection, self._tokenizer = connection, tokenizer
        self._matcher_of = llguidance.LLMatcher
        self._parser_limits = llguidance.LLParserLimits(verbose_errors=False, **settings["parser"])
        self._limits = _Limits(settings["step_seconds"], settings["seconds"], settings["seconds_per_token"])
        self._matchers: dict[int, Any] = {}

    def serve(self) -> None:
        """Compile the grammar, then do what the engine asks until it closes the connection."""
        source = receive_frame(self._connection).decode()
        with self._limits:
            self._first = self._matcher_of(self._tokenizer, source, log_level=0, limits=self._parser_limits)
            answer = self._mask(self._first)
        self._send(0, *answer)
        while True:
            message = receive_frame(self._connection)
            kind, text = HEADER.unpack_from(message)
            if kind == DROP:
                self._matchers.pop(text, None)
                continue
            if kind == REPLAY:
                self._matchers[text] = self._first.deep_copy()
            self._advance(text, [token for (token,) in TOKEN.iter_unpack(message[HEADER.size :])])

    def _advance(self, text: int, tokens: list[int]) -> None:
        matcher = self._matchers[text]
        self._limits.earn()
        with self._limits:
            for token in tokens:
                matcher.try_consume_tokens([token])  # a stop token of the request, which cannot follow, changes nothing
        error = matcher.get_error() if matcher.is_error() else ""
        if not error and self._limits.spent:
            error = "the grammar has used up its processor time"
        if error:
            self._send(text, ERROR, error.encode())
            return
        ended = bool(matcher.is_stopped())
        self._send(text, ADDED, bytes([ended]))
        if not ended:
            with self._limits:
                answer = self._mask(matcher)
            self._send(text, *answer)

    def _mask(self, matcher: Any) -> tuple[bytes, bytes]:
        """Return the kind and the content of the answer with the mask of the next token."""
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            return ERROR, str(matcher.get_error()).encode()
        return MASK, mask

    def _send(self, text: int, kind: bytes, content: bytes) -> None:
        send_frame(self._connection, HEADER.pack(kind, text), content)


def _serve_grammar(connection: socket.socket, tokenizer: Any, settings: dict[str, Any]) -> None:
    """Run the process of one grammar; does not return."""
    status = 0
    try:
        os.nice(settings["nice"])
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory := _data_bytes():
            most = memory + settings["memory"]
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        _Texts(connection, tokenizer, settings).serve()
    except (EOFError, OSError):
        pass  # the engine has closed the connection
    except MemoryError:
        status = OUT_OF_MEMORY
    except BaseException as error:
        status = 1
        with contextlib.suppress(OSError):
            send_frame(connection, HEADER.pack(ERROR, 0), f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(status)


def _data_bytes() -> int:
    """Return the memory of this process that `RLIMIT_DATA` counts; 0 where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
    return 0


def main(descriptor: int) -> None:
    """Read the tokenizer, and fork for each grammar until the engine closes the connection."""
    control = socket.socket(fileno=descriptor)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for the engine, which may finish requests first
        signal.signal(number, signal.SIG_IGN)
    processes: dict[int, int] = {}
    try:
        settings = json.loads(receive_frame(control))
        try:
            import llguidance

            tokenizer = llguidance.LLTokenizer(
                settings.pop("tokenizer"), n_vocab=settings["vocab"], eos_token=settings["end_tokens"] or None
            )
        except Exception as error:  # llguidance raises several kinds for tokenizers that it cannot read
            send_frame(control, f"{error}".encode())
            return
        send_frame(control, b"")
        gc.freeze()  # a collection in a child would copy the pages that it shares
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, CONTROL.size, 1)
            if not message:
                return
            kind, number = CONTROL.unpack(message)
            if kind == FORK:
                with socket.socket(fileno=descriptors[0]) as connection:
                    pid = os.fork()
                    if pid == 0:
                        control.close()
                        _serve_grammar(connection, tokenizer, settings)
                processes[number] = answer = pid
            else:
                answer = _end(processes.pop(number))
            control.sendall(ANSWER.pack(answer))
    except (EOFError, OSError):
        pass  # the engine has closed the connection
    finally:
        for pid in processes.values():
            _end(pid)


def _end(pid: int) -> int:
    """End a child, and return its exit status, negative if a signal ended it before."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
