"""Content hashes of weights, used to resume interrupted runs and to record the source of an output.

The algorithm is BLAKE3 if the blake3 package is installed (four times as fast as SHA-256 on one core, so that hashing
does not double the time of quantizing), SHA-256 otherwise. A digest starts with the name of its algorithm, so digests
of different algorithms never compare equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Protocol

try:
    from blake3 import blake3 as _new

    ALGORITHM = "blake3"
except ImportError:  # no wheel for this platform, or minifloat runs from its source tree without dependencies
    _new = hashlib.sha256  # type: ignore[assignment,misc]
    ALGORITHM = "sha256"


class Hasher(Protocol):
    """The common interface of hashlib and blake3."""

    def update(self, data: Any, /) -> object:
        """Add the bytes of a buffer."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes added so far."""

    def digest(self) -> bytes:
        """Return the digest of all bytes added so far."""


def new_hasher(*, parallel: bool = False) -> Hasher:
    """Return a new hasher."""
    if parallel and ALGORITHM == "blake3":
        return _new(max_threads=_new.AUTO)
    return _new()


def digest_bytes(data: Any, *, parallel: bool = False) -> bytes:
    """Return the digest of a contiguous buffer."""
    hasher = new_hasher(parallel=parallel)
    hasher.update(data)
    return hasher.digest()


def name_digest(hasher: Hasher) -> str:
    """Return the digest with the name of its algorithm, ``"blake3:..."``."""
    return f"{ALGORITHM}:{hasher.hexdigest()}"


def combine(digests: Iterable[tuple[str, str]]) -> str:
    """Return one digest for ``(name, digest)`` pairs; their order, and so the sharding of a model, does not matter."""
    hasher = _new()
    hasher.update(json.dumps(sorted(digests)).encode())
    return f"{ALGORITHM}:{hasher.hexdigest()}"
