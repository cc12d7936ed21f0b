"""The work folder of a job that can be continued after a kill, and its journal of what is finished.

Its first line names the run by a fingerprint of all that determines the result, each other one a finished file with
size, digest and record. A resumed run reads the files again and believes no line or file that has changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minifloat.checkpoint import schema
from minifloat.checkpoint.files import digest_bytes, is_safe_name, name_digest, new_hasher, read_exactly, storage_errors
from minifloat.checkpoint.header import header_of
from minifloat.checkpoint.layout import JOURNAL_FILE, SHARD_SUFFIX
from minifloat.checkpoint.own_folder import FolderLock, OwnFolder
from minifloat.checkpoint.schema import Check, Unfit, any_object
from minifloat.errors import CheckpointError, DestinationError, StorageError

#: Bytes that have a digest of their own at most, which a resumed run reads into memory at a time.
PIECE_BYTES = 16 << 20
LOCK_FILE = "lock"

_VERSION = 3
#: Largest journal that is read: that of a model with millions of tensors.
_LIMIT = 2**30
#: Files that are read again at a time.
_READERS = 4


@dataclass(frozen=True)
class WrittenFile:
    """What was written to a file: its size, the sizes of its pieces, and the digest over the digests of the pieces."""

    size: int
    pieces: tuple[int, ...]
    digest: str


class WorkFolder:
    """A work folder of one run at a time, locked while it is open."""

    def __init__(self, path: Path, is_ours: Callable[[str], bool]) -> None:
        """Lock the folder, which is created if it is missing; one with files of somebody else is refused."""
        self.path, self._is_ours = path, is_ours
        self.finished: dict[str, dict[str, Any]] = {}
        self.damaged: dict[str, str] = {}  #: why a file that the journal names is not what was written
        if os.path.lexists(path):
            with contextlib.closing(OwnFolder.open(path)) as folder:
                foreign = sorted(name for name in folder.names() if not (self._ours(name) or name.startswith(".")))
            if foreign:
                raise DestinationError(
                    f"{path}: holds {foreign[0]!r}, which minifloat did not create; move the folder away"
                )
        self._lock: FolderLock | None = FolderLock(path, LOCK_FILE)
        self._journal: _Journal | None = None
        self._mutex = threading.Lock()

    @property
    def folder(self) -> OwnFolder:
        if self._lock is None:
            raise AssertionError("the work folder is closed")
        return self._lock.folder

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    def resume(self, fingerprint: str) -> str | None:
        """Open the journal; return why the work of an earlier run is deleted, or None."""
        self._journal = _Journal(self.folder, JOURNAL_FILE)
        first = self._journal.entries[0] if self._journal.entries else {}
        if first == _first_line(fingerprint):
            return None
        reason = None
        if isinstance(first.get("run"), str):
            reason = "the interrupted run was of another source, scheme, option or version"
        elif any(map(self._is_ours, self.folder.names())):
            reason = "the state of the interrupted run cannot be read"
        self.clear(fingerprint)
        return reason

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The lines of the journal when it was opened, the first of which names the run."""
        return self._open_journal().entries

    def append(self, entry: dict[str, Any]) -> None:
        """Record a step of a job that has entries of its own in place of finished files."""
        self._open_journal().append(entry)

    def load(self, files: OwnFolder, check_record: Check = any_object) -> None:
        """Find the finished files, which are in the folder `files`, by reading them again."""
        self.finished, self.damaged = _finished_files(self._open_journal().entries, files, check_record)

    def finish(self, name: str, written: WrittenFile, record: dict[str, Any] | None = None) -> None:
        """Record a finished file; it, and its name in its folder, must be synced."""
        record = {} if record is None else record
        line = {"file": name, "size": written.size, "digest": written.digest, "pieces": written.pieces}
        self._open_journal().append({**line, "record": record})
        with self._mutex:
            self.finished[name] = record

    def discard(self, name: str) -> None:
        """Record that a finished file does not count any more, before it is deleted."""
        del self.finished[name]
        self._open_journal().append({"file": name, "discarded": True})

    def clear(self, fingerprint: str) -> None:
        """Delete everything but the lock, and begin the journal of a run."""
        self._remove_files()
        self.finished = {}
        self._open_journal().restart(_first_line(fingerprint))
        self.folder.sync()

    def empty(self) -> None:
        """Delete everything but the lock, the journal last: it marks an output as unfinished."""
        self._remove_files()
        self.folder.remove(JOURNAL_FILE)

    def close(self) -> None:
        """Release the lock, and delete the folder if it is empty; an error of the operating system is not raised."""
        lock, self._lock = self._lock, None
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()
        if lock is not None:
            unfinished = True
            with contextlib.suppress(StorageError):
                unfinished = lock.folder.has(JOURNAL_FILE)
            lock.release(remove=not unfinished)

    def _ours(self, name: str) -> bool:
        return name in (LOCK_FILE, JOURNAL_FILE) or self._is_ours(name)

    def _remove_files(self) -> None:
        for name in filter(self._is_ours, self.folder.names()):
            self.folder.remove(name)

    def _open_journal(self) -> _Journal:
        if self._journal is None:
            raise AssertionError("the work folder is closed")
        return self._journal


def _first_line(fingerprint: str) -> dict[str, Any]:
    return {"run": fingerprint, "version": _VERSION}


class _Journal:
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

    def restart(self, first: dict[str, Any]) -> None:
        with storage_errors(self._path, "write the journal"):
            os.ftruncate(self._descriptor, 0)
        self.entries, self._size = [first], 0
        self.append(first)

    def close(self) -> None:
        with contextlib.suppress(OSError):
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


def _finished_files(
    entries: Sequence[Mapping[str, Any]], folder: OwnFolder, check_record: Check
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the records of the journaled files that hold what was written, and why each other one does not."""
    files: dict[str, tuple[WrittenFile, dict[str, Any]]] = {}
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
        files.pop(name, None)
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
        files[name] = (WrittenFile(entry["size"], tuple(entry["pieces"]), entry["digest"]), entry["record"])
    with ThreadPoolExecutor(_READERS, thread_name_prefix="minifloat-verify") as pool:
        found = dict(zip(files, pool.map(lambda name: _damage(folder, name, files[name][0]), files), strict=True))
    finished = {name: record for name, (_, record) in files.items() if not found[name]}
    return finished, reasons | {name: reason for name, reason in found.items() if reason}


def _damage(folder: OwnFolder, name: str, written: WrittenFile) -> str:
    try:
        descriptor = folder.open_file(name, os.O_RDONLY)
    except FileNotFoundError:
        return "is missing"
    except (DestinationError, OSError) as error:
        return f"cannot be used: {error}"
    path = folder.path / name
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
        if name.endswith(SHARD_SUFFIX):
            header_of(descriptor, size, path)
    except (CheckpointError, StorageError) as error:
        return f"cannot be used: {error}"
    finally:
        os.close(descriptor)
    return ""


def written_file(folder: OwnFolder, name: str) -> WrittenFile:
    """Return the size and the digest of a complete file by reading it."""
    hasher = new_hasher()
    pieces: list[int] = []
    with folder.reading(name) as descriptor, storage_errors(folder.path / name, "read"):
        buffer = bytearray(min(PIECE_BYTES, os.fstat(descriptor).st_size))
        while count := os.preadv(descriptor, [buffer], sum(pieces)):
            hasher.update(digest_bytes(memoryview(buffer)[:count], parallel=True))
            pieces.append(count)
    return WrittenFile(sum(pieces), tuple(pieces), name_digest(hasher))
