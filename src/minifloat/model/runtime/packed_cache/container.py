"""The file of a packed cache: a prefix, a header in JSON, and the weights as they lie in memory.

    prefix   magic (8 bytes), bytes of the header (uint32), SHA-256 of the header (32 bytes)
    header   version of minifloat, byte order, options, identity of the source, entries, bytes of the file,
             digest of all bytes after the header
    entries  each begins at a page; the packed ones begin with a header of their own (``csrc/linear/layout.h``), which
             states the version of the layout. The layout is the same for all instruction sets.

A file is never changed: a new one is written beside it and renamed. It is not synced to the disk, because every start
checks the digest.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import mmap
import os
import secrets
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minifloat._version import __version__
from minifloat.checkpoint.digest import name_digest, new_hasher
from minifloat.checkpoint.files import Buffer, byte_view
from minifloat.model.runtime.packed_cache.folder import open_file

_MAGIC = b"MFPACK\x00\x01"
_PREFIX = struct.Struct("<8sI32s")
_PAGE = 4096
_MAX_HEADER = 256 << 20
_DRAFT = ".draft"
#: Drafts of processes that were killed are removed after this time.
_DRAFT_SECONDS = 3600.0


class UnusableCache(Exception):
    """A packed cache cannot be used; the message says why."""


@dataclass(frozen=True)
class Contents:
    """One entry to write.

    Attributes:
        data: Its bytes.
    """

    kind: str
    shape: tuple[int, ...]
    data: Buffer


@dataclass(frozen=True)
class Entry:
    """One entry of a file: `kind` and `shape` as in `Contents`, and its place."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Container:
    """A mapped file whose header fits; `verify` checks the rest.

    Attributes:
        digest: Digest of the bytes from there on.
    """

    map: mmap.mmap
    entries: Mapping[str, Entry]
    start: int
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.map)

    def verify(self) -> None:
        """Read all weights, which also maps their pages."""
        hasher = new_hasher(parallel=True)
        with memoryview(self.map) as view, view[self.start :] as data:
            hasher.update(data)
        if name_digest(hasher) != self.digest:
            raise UnusableCache("its weights are damaged: their digest differs")


def read(folder: int, name: str, expected: Mapping[str, Any]) -> Container:
    """Map a file."""
    try:
        opened = open_file(folder, name)
        if isinstance(opened, str):
            raise UnusableCache(opened)
        descriptor, status = opened
        try:
            header, start = _read_header(descriptor, status.st_size)
            _compare(header, _stated(expected))
            entries = {
                key: Entry(kind, tuple(shape), *place) for key, (kind, shape, *place) in header["entries"].items()
            }
            if any(entry.offset < start or entry.offset + entry.nbytes > status.st_size for entry in entries.values()):
                raise UnusableCache("its header is damaged")
            mapped = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnusableCache("its header is damaged") from error
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise UnusableCache(str(reason)) from error
    return Container(mapped, entries, start, header["digest"])


def write(folder: int, name: str, stated: Mapping[str, Any], contents: Mapping[str, Contents]) -> int:
    """Write a file, and return its bytes."""
    hasher, places, offset = new_hasher(parallel=True), {}, 0
    views = {key: byte_view(item.data) for key, item in contents.items()}
    for key, view in views.items():
        hasher.update(view)
        hasher.update(bytes(-len(view) % _PAGE))
        places[key] = offset
        offset += len(view) + -len(view) % _PAGE
    # the header states offsets that depend on its length: it gets the room that the longest offsets would need
    longest = _header(stated, contents, places, 1 << 60, offset, name_digest(hasher))
    start = math.ceil((_PREFIX.size + len(longest)) / _PAGE) * _PAGE
    header = _header(stated, contents, places, start, offset, name_digest(hasher)).ljust(start - _PREFIX.size)
    head = _PREFIX.pack(_MAGIC, len(header), hashlib.sha256(header).digest()) + header
    _remove_drafts(folder)
    temporary = f".{name}.{secrets.token_hex(8)}{_DRAFT}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            for view in (memoryview(head), *views.values()):
                rest = view
                while rest:
                    rest = rest[file.write(rest) or 0 :]
                file.write(bytes(-len(view) % _PAGE))
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:  # including Ctrl-C
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    return start + offset


def _stated(stated: Mapping[str, Any]) -> dict[str, Any]:
    return {"minifloat": __version__, "byte order": sys.byteorder, **stated}


def _header(
    stated: Mapping[str, Any],
    contents: Mapping[str, Contents],
    places: Mapping[str, int],
    start: int,
    nbytes: int,
    digest: str,
) -> bytes:
    entries = {
        key: [item.kind, list(item.shape), start + places[key], byte_view(item.data).nbytes]
        for key, item in contents.items()
    }
    return json.dumps(_stated(stated) | {"entries": entries, "bytes": start + nbytes, "digest": digest}).encode()


def _read_header(descriptor: int, size: int) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and where the weights begin."""
    prefix = os.pread(descriptor, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size or prefix[: len(_MAGIC)] != _MAGIC:
        raise UnusableCache("it is no packed cache of this version")
    _, length, digest = _PREFIX.unpack(prefix)
    data = os.pread(descriptor, length, _PREFIX.size) if length <= min(size, _MAX_HEADER) else b""
    if hashlib.sha256(data).digest() != digest:
        raise UnusableCache("its header is damaged")
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        raise UnusableCache("its header is no JSON") from None
    if not isinstance(header, dict):
        raise UnusableCache("its header is no object")
    if header.get("bytes") != size:
        raise UnusableCache(f"it has {size} bytes instead of {header.get('bytes')}")
    return header, _PREFIX.size + length


def _compare(header: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for key, value in expected.items():
        if header.get(key) != value:
            raise UnusableCache(_DIFFERENCES.get(key, "{key} differs").format(key=key, found=header.get(key)))


_DIFFERENCES = {
    "minifloat": "minifloat {found} made it",
    "source": "the checkpoint has changed since it was made",
    "options": "it was made with other options: {found}",
}


def _remove_drafts(folder: int) -> None:
    """Remove the drafts of processes that were killed while they wrote."""
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):
            if (
                entry.name.endswith(_DRAFT)
                and time.time() - entry.stat(follow_symlinks=False).st_mtime > _DRAFT_SECONDS
            ):
                os.unlink(entry.name, dir_fd=folder)
