"""The journal of finished shards: one JSON line per shard, readable after a kill at any byte.

Each line ends with a digest of itself, and holds the digest of the bytes that were written to the shard. A resumed run
reads its finished shards again and believes neither a line nor a shard that has changed.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from minifloat.checkpoint import schema
from minifloat.checkpoint.digest import digest_bytes, name_digest, new_hasher
from minifloat.checkpoint.files import is_safe_name, read_exactly, storage_errors
from minifloat.checkpoint.header import header_of
from minifloat.checkpoint.own_folder import OwnFolder
from minifloat.checkpoint.schema import Check, Unfit
from minifloat.errors import CheckpointError, DestinationError, StorageError

#: Largest journal that is read: that of a model with millions of tensors.
_LIMIT = 2**30
#: Shards that are read again at a time.
_READERS = 4


@dataclass(frozen=True)
class WrittenShard:
    """What was written to a shard."""

    size: int
    pieces: tuple[int, ...]
    digest: str


class Journal:
    """An append-only file of JSON objects. Thread-safe."""

    def __init__(self, folder: OwnFolder, name: str) -> None:
        self._path = folder.path / name
        self._lock = threading.Lock()
        with storage_errors(self._path, "open the journal"):
            self._descriptor = folder.open_file(name, os.O_RDWR | os.O_CREAT)
            try:
                size = os.fstat(self._descriptor).st_size
                if size > _LIMIT:
                    raise DestinationError(f"{self._path}: {size:,} bytes are more than any journal has; delete it")
                data = bytearray(size)
                read_exactly(self._descriptor, memoryview(data), 0, self._path)
                self.entries, self._size = _whole_lines(bytes(data))
                os.ftruncate(self._descriptor, self._size)
            except BaseException:
                os.close(self._descriptor)
                raise

    def append(self, entry: dict[str, Any]) -> None:
        """Append an object and sync it to the disk."""
        line = sealed_line(json.dumps(entry, separators=(",", ":")).encode())
        with self._lock, storage_errors(self._path, "write the journal"):
            try:
                count = 0
                while count < len(line):
                    count += os.pwrite(self._descriptor, line[count:], self._size + count)
                os.fsync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, self._size)
                raise
            self._size += len(line)

    def close(self) -> None:
        """Close the file."""
        with storage_errors(self._path, "close the journal"):
            os.close(self._descriptor)


def sealed_line(text: bytes) -> bytes:
    """Return the line of a JSON object: the object with one more member, the digest of its text."""
    return b'%s,"line":"%s"}\n' % (text[:-1], digest_bytes(text).hex().encode())


def _whole_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the objects before the first damaged line, and the number of bytes of their lines."""
    entries: list[dict[str, Any]] = []
    size = 0
    for line in data.splitlines(keepends=True):
        text = line[: line.rfind(b',"line":"')] + b"}"
        if line != sealed_line(text):
            break
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not isinstance(entry, dict):
            break
        entries.append(entry)
        size += len(line)
    return entries, size


def shard_entry(name: str, written: WrittenShard, record: dict[str, Any]) -> dict[str, Any]:
    """Return the journal's object for a finished shard."""
    return {
        "file": name,
        "size": written.size,
        "digest": written.digest,
        "pieces": written.pieces,
        "record": record,
    }


def discarded_entry(name: str) -> dict[str, Any]:
    """Return the journal's object for a shard that is to be written again."""
    return {"file": name, "discarded": True}


def finished_shards(
    entries: Sequence[Mapping[str, Any]], output: OwnFolder, check_record: Check
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the records of the journaled shards that hold what was written, and why each other one does not."""
    shards: dict[str, tuple[WrittenShard, dict[str, Any]]] = {}
    reasons: dict[str, str] = {}
    check_entry = schema.exact_fields(
        {
            "file": schema.text,
            "size": schema.natural,
            "digest": schema.text,
            "pieces": schema.list_of(schema.integer(1, 2**63)),
            "record": check_record,
        }
    )
    for entry in entries:
        name = entry.get("file")
        if not isinstance(name, str) or not is_safe_name(name):
            continue
        shards.pop(name, None)
        reasons.pop(name, None)
        if "discarded" in entry:
            continue
        try:
            check_entry(entry, "line")
            if sum(entry["pieces"]) != entry["size"]:
                raise Unfit("line.pieces", "sizes whose sum is that of the file", entry["pieces"])
        except Unfit as unfit:
            reasons[name] = f"has an unusable line in the journal ({unfit})"
            continue
        written = WrittenShard(entry["size"], tuple(entry["pieces"]), entry["digest"])
        shards[name] = (written, entry["record"])
    with ThreadPoolExecutor(_READERS, thread_name_prefix="minifloat-verify") as pool:
        found = dict(zip(shards, pool.map(lambda name: _damage(output, name, shards[name][0]), shards), strict=True))
    finished = {name: record for name, (_, record) in shards.items() if not found[name]}
    return finished, reasons | {name: reason for name, reason in found.items() if reason}


def _damage(output: OwnFolder, name: str, written: WrittenShard) -> str:
    """Return why a file is not the shard that was written; empty if it is."""
    try:
        descriptor = output.open_file(name, os.O_RDONLY)
    except FileNotFoundError:
        return "is missing"
    except (DestinationError, OSError) as error:
        return f"cannot be used: {error}"
    path = output.path / name
    try:
        size = os.fstat(descriptor).st_size
        if size != written.size:
            return f"has {size:,} bytes, {written.size:,} were written"
        hasher = new_hasher()
        buffer, at = bytearray(max(written.pieces, default=0)), 0
        for piece in written.pieces:
            view = memoryview(buffer)[:piece]
            read_exactly(descriptor, view, at, path)
            hasher.update(digest_bytes(view))
            at += piece
        if name_digest(hasher) != written.digest:
            return "holds other bytes than were written"
        header_of(descriptor, size, path)
    except (CheckpointError, StorageError) as error:
        return f"cannot be used: {error}"
    finally:
        os.close(descriptor)
    return ""
