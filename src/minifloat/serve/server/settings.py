"""Settings of a server: names, keys, limits.

They are one dataclass, so that the command line, a test and an embedding application create the same server. Options of
the engine (memory, context, dtypes) are not among them.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from minifloat.errors import StorageError, UsageError
from minifloat.kernels.processors import TeamOptions
from minifloat.numerics.ranges import Bytes, Count, Natural, NonNegative, Port, Positive, check_fields
from minifloat.serve.dialog.formats import NAMES

_MIB = 1 << 20
#: Characters per token of the context that a prompt may have. Text has about four; long runs of blanks have more.
_CHARACTERS_PER_TOKEN = 32
#: Shortest API key that is accepted. A key that can be guessed only looks like protection.
_MIN_KEY_LENGTH = 8


@dataclass(frozen=True)
class ServerSettings(TeamOptions):
    """Name, address, keys, limits and threads of a server.

    Attributes:
        model_name: Name of the model in requests.
        host: Address to listen on; 0.0.0.0 is every address.
        port: TCP port; 0 lets the system choose a free one.
        api_keys: SHA-256 of the keys of which a request must carry one; empty: no key is needed.
        allowed_hosts: Host name to answer to; repeatable. A loopback address has its own names too; another one without
            names has all.
        chat_template: Jinja template instead of the tokenizer's own.
        tool_format: How the model writes calls of tools (docs/serving.md has the names); auto: as the chat template
            says; none: tools are refused.
        reasoning_format: auto: thinking is told apart from answers; none: it is part of their text.
        max_body_bytes: Largest body of a request.
        max_header_bytes: Largest request line with headers.
        max_prompt_characters: Longest prompt to tokenize; None: 32 per token of context.
        max_num_queued_reqs: Requests that may wait; more get 503.
        max_connections: Open connections. Beyond it, the oldest one that waits for its client makes room; if all are at
            work, more get 503.
        keep_alive_timeout: Seconds until an idle connection is closed; more than a proxy keeps it.
        read_timeout: Seconds for a client to send a head, and then a body.
        write_timeout: Seconds for a client to take 64 KiB of its answer, or all that is written of it.
        request_timeout: Seconds from the arrival of a request to the end of its answer.
        shutdown_timeout: Seconds that admitted requests have to finish after SIGTERM.
        quiet: Whether to log warnings only, not every request.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: Port = 8000
    api_keys: frozenset[bytes] = field(default=frozenset(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_format: str = "auto"
    reasoning_format: Literal["auto", "none"] = "auto"
    max_body_bytes: Bytes = 8 * _MIB
    max_header_bytes: Bytes = 16 * 1024
    max_prompt_characters: Count | None = None
    max_num_queued_reqs: Natural = 256
    max_connections: Count = 2048
    keep_alive_timeout: Positive = 30.0
    read_timeout: Positive = 30.0
    write_timeout: Positive = 30.0
    request_timeout: Positive = 600.0
    shutdown_timeout: NonNegative = 30.0
    quiet: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tool_format not in ("auto", "none", *NAMES):
            raise UsageError(f"--tool-format {self.tool_format}: expected auto, none or one of {', '.join(NAMES)}")

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    def prompt_characters(self, max_model_len: int) -> int:
        """Return the length of the longest prompt, for a model with a context of `max_model_len` tokens."""
        if self.max_prompt_characters is not None:
            return self.max_prompt_characters
        return _CHARACTERS_PER_TOKEN * max_model_len


def hash_key(key: bytes) -> bytes:
    """Return the SHA-256 of an API key, which is all that the server keeps of it."""
    return hashlib.sha256(key).digest()


def read_api_keys(keys: Iterable[str] = (), file: Path | None = None) -> frozenset[bytes]:
    return frozenset(hash_key(key.encode("ascii")) for key in collect_api_keys(keys, file))


def collect_api_keys(keys: Iterable[str] = (), file: Path | None = None) -> tuple[str, ...]:
    """Return `keys` and the keys in `file`, one per line."""
    collected = list(keys)
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"{file}: the file of API keys cannot be read: {error}") from error
        collected += [line for line in lines if line and not line.startswith("#")]
        if not collected:
            raise UsageError(f"{file}: no API key in it; write one per line")
    for number, key in enumerate(collected, 1):
        if len(key) < _MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(
                f"API key {number}: expected at least {_MIN_KEY_LENGTH} printable ASCII characters without spaces; "
                "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
    return tuple(collected)


def read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{file}: the chat template cannot be read: {error}") from error
