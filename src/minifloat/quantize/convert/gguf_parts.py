"""`PartsWriter`: the files of a GGUF model while they are written, tensor after tensor, in a work folder beside them.

Whenever a quarter GiB is written, and at the end of each file, it is synced and recorded with its digest; a run that
was interrupted goes on behind the last record. The files move to their names at the end, the one that is loaded last.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import gguf

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.files import (
    byte_view,
    name_digest,
    new_hasher,
    open_regular,
    read_exactly,
    require_space,
    storage_errors,
    sync_folder,
)
from minifloat.checkpoint.journal import PIECE_BYTES, WorkFolder
from minifloat.checkpoint.schema import Unfit, exact_fields, map_of, natural, text
from minifloat.checkpoint.writer import WORK_SUFFIX
from minifloat.errors import CheckpointError, StorageError, TensorError
from minifloat.quantize.stream import copy_digest

STEP_BYTES = 256 << 20
_OUTPUT = "output"
_DAMAGED = "what it wrote is damaged: check the disk"
#: A line of the journal: tensors done so far, bytes of the file so far and the digest of the new ones; details of the
#: new tensors and digests of their sources, by name.
_STEP = exact_fields(
    {"done": natural, "size": natural, "digest": text, "details": map_of(text), "sources": map_of(text)}
)


def padding(size: int) -> bytes:
    """Return the zeros that GGUF wants behind so many bytes."""
    return bytes(-size % gguf.GGUF_DEFAULT_ALIGNMENT)


@dataclass(frozen=True)
class Part:
    """A file: its path, all bytes before its tensors, the number of these, and its size."""

    path: Path
    header: bytes
    tensors: int
    size: int


class PartsWriter:
    """Writes the tensors of all files in their order. A context manager; an exit without `commit` keeps the work."""

    def __init__(self, parts: Sequence[Part], fingerprint: str, checkpoint: Checkpoint) -> None:
        """Lock the work folder, and check what an interrupted run of the same fingerprint wrote."""
        self._parts, self._ends = parts, list(accumulate(part.tensors for part in parts))
        first = parts[0].path
        self._work = WorkFolder(first.with_name(first.name + WORK_SUFFIX), _OUTPUT.__eq__)
        self._descriptor, self._index = -1, -1  # of the file that is open
        self._forget()
        try:
            self.restarted_because = self._work.resume(fingerprint)
            self._output = self._work.folder.folder(_OUTPUT)
            reason = self._resume(checkpoint)
            if reason is not None:
                self.restarted_because = reason
                self._forget()
                self._output.close()
                self._work.clear(fingerprint)
                self._output = self._work.folder.folder(_OUTPUT)
            self.resumed = self.done  #: tensors of an interrupted run that are kept
            require_space(self._work.path, sum(part.size for part in parts) - sum(self._sizes), first)
        except BaseException:
            self._close(keep=any(self._sizes))
            raise

    def __enter__(self) -> PartsWriter:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._close(keep=any(self._sizes) and not isinstance(error, (TensorError, CheckpointError)))

    def add(self, name: str, data: Any, detail: str, sources: Mapping[str, str]) -> None:
        """Write the next tensor; `detail` goes to the report, `sources` are digests of what it was made of."""
        index = bisect.bisect_right(self._ends, self.done)
        if index != self._index:
            self._open(index)
        self._write(data)
        self._write(padding(self._size))
        self._new["details"][name] = self.details[name] = detail
        self._new["sources"] |= sources
        self.sources |= sources
        self.done += 1
        if self._size - self._sizes[index] >= STEP_BYTES or self.done == self._ends[index]:
            self._record()

    def commit(self) -> None:
        """Move the files, which are whole, to their names."""
        for part in reversed(self._parts):
            if self._output.has(part.path.name):  # not where an interrupted run has moved it
                with storage_errors(part.path, "put the finished file in place"):
                    os.rename(part.path.name, part.path, src_dir_fd=self._output.descriptor)
        sync_folder(self._parts[0].path.parent)
        self._close(keep=False)

    def _forget(self) -> None:
        self.details: dict[str, str] = {}
        self.sources: dict[str, str] = {}
        self.done = 0
        self._sizes = [0] * len(self._parts)  # bytes of each file that are recorded

    def _resume(self, checkpoint: Checkpoint) -> str | None:
        """Take over the steps of an interrupted run; return why none is taken over, or None."""
        for step in self._work.entries[1:]:
            try:
                _STEP(step, "line")
            except Unfit:
                return _DAMAGED
            index = bisect.bisect_right(self._ends, self.done)
            if index == len(self._parts) or not self.done < step["done"] <= self._ends[index]:
                return _DAMAGED
            if step["digest"] != self._digest(self._parts[index].path, self._sizes[index], step["size"]):
                return _DAMAGED
            for name, digest in step["sources"].items():
                if name not in checkpoint.tensors or copy_digest(checkpoint, checkpoint.tensors[name]) != digest:
                    return f"{name} of the source changed"
            self._sizes[index], self.done = step["size"], step["done"]
            self.details |= step["details"]
            self.sources |= step["sources"]
        return None

    def _digest(self, path: Path, start: int, stop: int) -> str | None:
        """Return the digest of bytes of a file; None where it has not as many."""
        hasher = new_hasher()
        with contextlib.ExitStack() as stack:
            try:
                if self._output.has(path.name):
                    descriptor = stack.enter_context(self._output.reading(path.name))
                else:
                    descriptor, _ = open_regular(path)
                    stack.callback(os.close, descriptor)
                while start < stop:
                    piece = memoryview(bytearray(min(PIECE_BYTES, stop - start)))
                    read_exactly(descriptor, piece, start, path)
                    hasher.update(piece)
                    start += len(piece)
            except (FileNotFoundError, StorageError, CheckpointError):
                return None
        return name_digest(hasher)

    def _open(self, index: int) -> None:
        """Go on with a file behind what is recorded."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        part, self._index = self._parts[index], index
        with storage_errors(part.path, "create the file"):
            self._descriptor = self._output.open_file(part.path.name, os.O_RDWR | os.O_CREAT)
            os.ftruncate(self._descriptor, self._sizes[index])
        self._begin_step()
        if not self._size:
            self._write(part.header)

    def _begin_step(self) -> None:
        self._size, self._hasher = self._sizes[self._index], new_hasher()
        self._new: dict[str, dict[str, str]] = {"details": {}, "sources": {}}

    def _write(self, data: Any) -> None:
        view = byte_view(data)
        self._hasher.update(view)
        with storage_errors(self._parts[self._index].path, "write"):
            while view:
                count = os.pwrite(self._descriptor, view, self._size)
                view, self._size = view[count:], self._size + count

    def _record(self) -> None:
        with storage_errors(self._parts[self._index].path, "sync"):
            os.fsync(self._descriptor)
        self._output.sync()
        self._work.append({"done": self.done, "size": self._size, "digest": name_digest(self._hasher), **self._new})
        self._sizes[self._index] = self._size
        self._begin_step()

    def _close(self, *, keep: bool) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._work.is_open:
            with contextlib.suppress(OSError, StorageError):
                if not keep:
                    self._work.empty()
            self._work.close()
