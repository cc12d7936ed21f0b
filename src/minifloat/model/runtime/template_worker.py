"""The process that renders chat templates, so that a template can take no memory or time from anything else.

A template is a program that comes with a checkpoint. Jinja's sandbox bounds what it can reach, not what it takes: one
call of a method of strings can ask for gigabytes, or run for minutes in C, where no Python code can stop it. This
process limits itself before it renders anything: its address space, the processor time of each rendering (the system
ends the process), and files, sockets and processes, of which it can open none.

It reads requests from its standard input and writes answers to its standard output, each a JSON object after its length
in 4 bytes. `minifloat.model.runtime.templates` starts it. It imports Jinja and the standard library only.
"""

from __future__ import annotations

import json
import signal
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

#: The length of a message, in bytes.
HEADER = struct.Struct("<I")
#: Memory that templates may take, in bytes.
MEMORY = 512 << 20
#: Length of the longest error of a template that is passed on.
_MAX_ERROR = 500


def main() -> None:
    """Answer requests until the standard input ends."""
    from minifloat.model.runtime import chat_format

    _import_everything(chat_format.render)
    _limit()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while (request := _read(requests)) is not None:
        try:
            answer = _answer(request, chat_format.render, chat_format.visible_length)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        data = json.dumps(answer).encode()
        answers.write(HEADER.pack(len(data)) + data)
        answers.flush()
        if answer.get("failed") == "memory":
            return  # what is left of the memory may be in pieces; a new process has all of it


def _read(requests: IO[bytes]) -> dict[str, Any] | None:
    header = requests.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    request: dict[str, Any] = json.loads(requests.read(length))
    return request


def _answer(
    request: dict[str, Any], render: Callable[..., str], visible_length: Callable[[str], int]
) -> dict[str, str]:
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    try:
        text = render(request["template"], request["messages"], request["variables"])
        if visible_length(text) > request["max_characters"]:
            return {"failed": "length"}
        text.encode()
    except MemoryError:
        return {"failed": "memory"}
    except UnicodeEncodeError:
        return {"failed": "error", "message": "it writes half of a surrogate pair, which is no character"}
    except Exception as error:  # a template may raise anything
        with suppress(MemoryError):
            message = str(error)[:_MAX_ERROR].encode(errors="replace").decode()
            return {"failed": "error", "message": message or type(error).__name__}
        return {"failed": "memory"}
    return {"text": text}


def _import_everything(render: Callable[..., str]) -> None:
    """Import what Jinja imports when it is first needed, since no file can be opened later."""
    import encodings.idna
    import encodings.unicode_escape
    import pprint
    import textwrap

    import jinja2.constants
    import jinja2.debug

    time.localtime()
    with suppress(Exception):
        render("{{ messages | tojson }}{{ 'a b' | wordwrap(1) }}{{ strftime_now('%Y %B') }}{{ 1 / 0 }}", [], {})
    del encodings, pprint, textwrap, jinja2


def _limit() -> None:
    """Give up what templates do not need."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # the end of the standard input ends this process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    import resource

    limits = {"RLIMIT_AS": _address_space() + MEMORY, "RLIMIT_NOFILE": 0, "RLIMIT_NPROC": 0}
    limits |= {"RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    for limit, value in limits.items():
        with suppress(AttributeError, OSError, ValueError):  # not every system has every limit
            resource.setrlimit(getattr(resource, limit), (value, value))


def _address_space() -> int:
    """Return the bytes of address space in use."""
    import resource

    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
