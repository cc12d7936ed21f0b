"""Renders chat templates in a process of their own: `apply_chat_template`.

The process (`template_worker`) is started when it is first needed, lives as long as this one, and is replaced when a
template has used up its limits. One process serves all threads. The text is that of transformers' tokenizers, with
which tests/runtime/test_templates.py compares.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from minifloat.errors import ChatTemplateError
from minifloat.model.runtime.template_worker import HEADER, MEMORY

if TYPE_CHECKING:
    from minifloat.model.runtime.tokenizer import TextTokenizer

#: What the process needs of the environment; it gets no keys and tokens.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME", "TZ")
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from minifloat.model.runtime.template_worker import main; main()"
)
#: Seconds of waiting per second of processor time, since other programs use the processors too.
_PATIENCE, _START_SECONDS = 10.0, 60.0
#: Bytes per character of an answer, at most: two escapes of JSON.
_BYTES_PER_CHARACTER = 12
#: Names for a message's reasoning, of which transformers fills the first and second from the others.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class RenderLimits:
    """What one rendering may take.

    Attributes:
        seconds: Processor time.
    """

    seconds: float = 10.0
    max_characters: int = 1 << 24


_DEFAULT_LIMITS = RenderLimits()


class _Ended(Exception):
    """The process ended, or did not answer."""


class TemplateWorker:
    """Starts the process, talks to it, and replaces it. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def start(self) -> None:
        """Start the process, so that it is ready when the first template comes."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        limits: RenderLimits = _DEFAULT_LIMITS,
    ) -> str:
        """Return the text that a chat template makes of messages."""
        request = {
            "template": template,
            "messages": [dict(message) for message in messages],
            "variables": dict(variables),
            "seconds": limits.seconds,
            "max_characters": limits.max_characters,
        }
        data = json.dumps(request, default=_placeholder).encode()
        with self._lock:
            try:
                answer = self._ask(data, limits)
            except _Ended:  # ended by something else, such as the system, since it was last used
                try:
                    answer = self._ask(data, limits)
                except _Ended as error:
                    raise ChatTemplateError(f"the chat template ended the process that renders it: {error}") from None
        failed = answer.get("failed")
        if failed == "length":
            raise ChatTemplateError(f"the chat template writes more than {limits.max_characters} characters")
        if failed == "memory":
            raise ChatTemplateError(f"the chat template needs more than {MEMORY >> 20} MiB of memory")
        if failed is not None:
            raise ChatTemplateError(f"the chat template refuses the messages: {answer.get('message')}")
        return str(answer["text"])

    def _ask(self, data: bytes, limits: RenderLimits) -> dict[str, Any]:
        process = self._running()
        requests, answers = process.stdin, process.stdout
        assert requests is not None
        assert answers is not None
        end = time.monotonic() + _START_SECONDS + _PATIENCE * limits.seconds
        try:
            requests.write(HEADER.pack(len(data)) + data)
            requests.flush()
            (length,) = HEADER.unpack(_receive(answers, HEADER.size, end))
            if length > _BYTES_PER_CHARACTER * limits.max_characters + 65536:
                raise _Ended("its answer is too long")
            answer: dict[str, Any] = json.loads(_receive(answers, length, end))
        except (OSError, ValueError, _Ended) as error:
            status = self._end()
            if status == -signal.SIGPROF or isinstance(error, TimeoutError):
                raise ChatTemplateError(f"the chat template ran for more than {limits.seconds:g} s") from None
            raise _Ended(str(error) or f"status {status}") from None
        if answer.get("failed") == "memory":
            self._end()
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process, started if there is none."""
        if self._process is not None and self._owner != os.getpid():
            self._process = None  # this process is a fork of the one that started it
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # Ctrl-C in a terminal is for the server, which finishes its requests
            )
            self._owner = os.getpid()
        return self._process

    def _end(self) -> int | None:
        """End the process, and return its status. One that has ended by itself keeps its own status."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2 if process.stdout is not None and _at_end(process.stdout) else 0)
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return process.wait()


def _at_end(pipe: IO[bytes]) -> bool:
    """Whether the other end of a pipe is closed, so that the process is ending."""
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


def _receive(pipe: IO[bytes], length: int, end: float) -> bytes:
    """Return so many bytes of a pipe."""
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    received = bytearray()
    while len(received) < length:
        if not poller.poll(max(0.0, end - time.monotonic()) * 1000):
            raise TimeoutError
        piece = os.read(pipe.fileno(), length - len(received))
        if not piece:
            raise _Ended
        received += piece
    return bytes(received)


def _placeholder(value: Any) -> Any:
    """Return what a template sees of a value that is no plain data: transformers gives the name of its type."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    return str(value) if type(value).__name__ == "AddedToken" else f"<{type(value).__name__}>"


#: The process that all of this program's templates share.
WORKER = TemplateWorker()
atexit.register(WORKER.close)


def apply_chat_template(
    tokenizer: TextTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = False,
    limits: RenderLimits = _DEFAULT_LIMITS,
    **variables: Any,
) -> str:
    """Return the text of a conversation, as transformers' method of this name does."""
    template = _template(tokenizer, chat_template)
    values = {**tokenizer.special_tokens_map, **variables, "add_generation_prompt": add_generation_prompt}
    return WORKER.render(template, [_prepared(message) for message in messages], values, limits)


def chat_tokens(
    tokenizer: TextTokenizer,
    messages: Sequence[Mapping[str, str]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = False,
    limits: RenderLimits = _DEFAULT_LIMITS,
    **variables: Any,
) -> list[int]:
    """Return the tokens of a conversation; control tokens in messages and variables become tokens of plain text.

    They are those of transformers' `apply_chat_template` with `sanitize_control_tokens`.
    """
    from minifloat.model.runtime.chat_format import ControlTokens

    to_id: Callable[[str], Any] = tokenizer.convert_tokens_to_ids
    template = _template(tokenizer, chat_template)
    added = sorted(tokenizer.added_tokens_decoder.items())
    extra = getattr(tokenizer, "chat_control_tokens", None) or ()
    try:
        control = ControlTokens.of(
            template, tuple((token.content, token.special or token.content in extra) for _, token in added)
        )
    except Exception as error:  # the template cannot be parsed
        raise ChatTemplateError(f"the chat template is not valid: {error}") from error
    marked = [{name: control.mark(text) for name, text in message.items()} for message in messages]
    values = {name: control.mark(value) if isinstance(value, str) else value for name, value in variables.items()}
    text = apply_chat_template(
        tokenizer,
        marked,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        limits=limits,
        **values,
    )
    try:
        return control.encode(
            text,
            lambda piece: list(tokenizer(piece, add_special_tokens=False, verbose=False).input_ids),
            lambda piece: _encode_as_text(tokenizer, piece),
            to_id,
        )
    except Exception as error:  # tokenizers raise bare exceptions
        raise ChatTemplateError(f"the text of the chat template cannot be tokenized: {error}") from error


def _template(tokenizer: TextTokenizer, stated: str | None) -> str:
    """Return the Jinja source, of several the default one."""
    template = stated or tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise ChatTemplateError("the tokenizer has no chat template")
    return template


def _encode_as_text(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text in which no added token is recognized."""
    for name in ("encode_as_text", "_encode_without_added_tokens"):  # ours, and newer transformers'
        if hasattr(tokenizer, name):
            return list(getattr(tokenizer, name)(text))
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without empty fields, and with its reasoning under the names that templates read."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}
