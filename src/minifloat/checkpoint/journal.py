"""The journal of finished shards: one JSON line per shard, readable after a kill at any byte."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minifloat.checkpoint.files import is_safe_name, storage_errors
from minifloat.checkpoint.header import read_header
from minifloat.errors import CheckpointError, StorageError


class Journal:
    """An append-only file of JSON objects. Thread-safe.

    Attributes:
        entries: The objects that were in the file when it was opened. A line that is cut short, and everything after
            it, is removed from the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        with storage_errors(path, "open the journal"):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            data = path.read_bytes()
            self.entries, self._size = _whole_lines(data)
            os.ftruncate(self._descriptor, self._size)

    def append(self, entry: dict[str, Any]) -> None:
        """Append an object and sync it to the disk.

        Raises:
            StorageError: If the operating system refuses; the journal is then unchanged.
        """
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
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
        os.close(self._descriptor)


def _whole_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the objects before the first damaged line, and the number of bytes of their lines."""
    entries: list[dict[str, Any]] = []
    size = 0
    for line in data.splitlines(keepends=True):
        try:
            entry = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            break
        if not isinstance(entry, dict):
            break
        entries.append(entry)
        size += len(line)
    return entries, size


def finished_shards(entries: Sequence[Mapping[str, Any]], output: Path) -> dict[str, dict[str, Any]]:
    """Return the records of journaled shards whose files are present with a valid header and the journaled size."""
    shards: dict[str, tuple[int, dict[str, Any]]] = {}
    for entry in entries:
        name, size, record = entry.get("file"), entry.get("size"), entry.get("record")
        if not isinstance(name, str) or not is_safe_name(name):
            continue
        shards.pop(name, None)
        if isinstance(size, int) and isinstance(record, dict):
            shards[name] = (size, record)
    return {name: record for name, (size, record) in shards.items() if _is_whole(output / name, size)}


def _is_whole(path: Path, size: int) -> bool:
    try:
        _, status = read_header(path)
    except (CheckpointError, StorageError, FileNotFoundError):
        return False
    return status.st_size == size
