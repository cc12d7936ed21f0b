"""A writer of one safetensors file for many threads, which write tensors and slabs of rows in any order.

The header is written last: until then the file starts with a length of zero, which no reader accepts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minifloat.checkpoint.files import Buffer, byte_view, digest_bytes, name_digest, new_hasher, storage_errors
from minifloat.checkpoint.header import encode_header
from minifloat.checkpoint.journal import PIECE_BYTES, WrittenFile
from minifloat.checkpoint.own_folder import OwnFolder
from minifloat.checkpoint.tensors import OutputTensor
from minifloat.errors import StorageError

#: Bytes that are written before the operating system is asked to start moving them to the disk.
_WRITE_BACK_BYTES = 64 << 20
#: ``SYNC_FILE_RANGE_WRITE`` of Linux.
_START_WRITING = 2
#: Error numbers of file systems that cannot reserve space.
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)


class ShardWriter:
    """The writer of one shard, created by `CheckpointWriter.shard`. Thread-safe."""

    def __init__(
        self,
        folder: OwnFolder,
        name: str,
        tensors: Sequence[OutputTensor],
        metadata: Mapping[str, str],
        journal: Callable[[WrittenFile, dict[str, Any]], None],
    ) -> None:
        self.path, self._folder = folder.path / name, folder
        self._header, self._spans = encode_header(tensors, metadata)
        self._size = len(self._header) + sum(size for _, size in self._spans.values())
        self._written: dict[str, list[tuple[int, int, bytes]]] = {name: [] for name in self._spans}
        self._unsent = 0
        self._journal = journal
        self._lock = threading.Lock()
        with storage_errors(self.path, f"create a file of {self._size} bytes"):
            self._descriptor: int | None = folder.open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                _reserve(self._descriptor, self._size)
            except BaseException:
                self.abandon()
                raise

    def write(self, tensor: str, data: Buffer, start: int = 0) -> None:
        view = byte_view(data)
        offset, size = self._spans[tensor]
        if start < 0 or start + len(view) > size:
            raise AssertionError(f"{tensor}: bytes {start} to {start + len(view)} of a tensor of {size}")
        pieces = [  # hashed outside of the lock, while the bytes are in the cache
            (start + at, start + at + len(piece), digest_bytes(piece))
            for at in range(0, len(view), PIECE_BYTES)
            for piece in (view[at : at + PIECE_BYTES],)
        ]
        self._write_at(view, offset + start)
        with self._lock:
            self._written[tensor] += pieces
            self._unsent += len(view)
            descriptor = self._descriptor if self._unsent >= _WRITE_BACK_BYTES else None
            if descriptor is not None:
                self._unsent = 0
        if descriptor is not None:
            _start_write_back(descriptor)

    def commit(self, record: dict[str, Any]) -> None:
        """Finish the file: check that every byte was written once, sync the file, then append to the journal."""
        written = self._check_written()
        self._write_at(memoryview(self._header), 0)
        with storage_errors(self.path, "sync"):
            os.fsync(self._open_descriptor())
        self.close()
        self._journal(written, record)

    def _check_written(self) -> WrittenFile:
        """Check that every byte was written once; return the digest of all pieces in their order in the file."""
        pieces, hasher = [len(self._header)], new_hasher()
        hasher.update(digest_bytes(self._header))
        for tensor, (_, size) in self._spans.items():
            end = 0
            for start, stop, digest in sorted(self._written[tensor]):
                if start != end:
                    raise AssertionError(f"{tensor}: byte {min(start, end)} was written twice or never")
                pieces.append(stop - start)
                hasher.update(digest)
                end = stop
            if end != size:
                raise AssertionError(f"{tensor}: byte {end} was never written")
        return WrittenFile(self._size, tuple(pieces), name_digest(hasher))

    def close(self) -> None:
        """Close the file without finishing it."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with storage_errors(self.path, "close it"):
                os.close(descriptor)

    def abandon(self) -> None:
        """Close and delete the unfinished file, which frees its space on a full disk."""
        with contextlib.suppress(StorageError):
            self.close()
        self._folder.remove(self.path.name)

    def _write_at(self, view: memoryview, offset: int) -> None:
        # The lock costs no speed, because the operating system lets one thread at a time write to a file. Without it a
        # thread could write to a descriptor that another thread has closed and that now belongs to another file.
        with self._lock, storage_errors(self.path, "write"):
            while view:
                # A single call moves at most 2 GiB.
                count = os.pwrite(self._open_descriptor(), view, offset)
                view, offset = view[count:], offset + count

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise AssertionError(f"{self.path}: the shard is closed")
        return self._descriptor


def _start_write_back(descriptor: int) -> None:
    """Start moving all that was written to the disk, without waiting, so that the sync at the end finds little left."""
    start = _sync_file_range()  # a hint: an error shows in the sync, a closed descriptor does no harm
    if start is not None:
        start(descriptor, 0, 0, _START_WRITING)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return ``sync_file_range`` of the C library, which releases the interpreter lock; None where there is none."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):  # not Linux
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


def _reserve(descriptor: int, size: int) -> None:
    """Set the size of the file and, where the file system can, reserve its space."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
        else:
            return
    os.ftruncate(descriptor, size)
