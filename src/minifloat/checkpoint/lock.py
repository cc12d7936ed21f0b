"""A lock on a work folder that allows one writer, also after a simultaneous start or a kill."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from minifloat.checkpoint.files import storage_errors
from minifloat.errors import DestinationError


class FolderLock:
    """An exclusive lock on a folder: an flock on a file in it, which the system releases when the process ends.

    Raises:
        DestinationError: If another process holds the lock.
        StorageError: If the folder cannot be created, or its file system has no locks.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        with storage_errors(self._path, "lock the work folder"):
            while True:
                with contextlib.suppress(FileExistsError):
                    folder.mkdir()
                try:
                    self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                except FileNotFoundError:  # the previous owner has just removed the folder
                    continue
                if self._acquire():
                    return
                os.close(self._descriptor)

    def _acquire(self) -> bool:
        """Lock the open file; return False if the previous owner has removed it meanwhile."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise DestinationError(
                f"{self._path.parent}: process {owner or 'unknown'} is writing here; wait for it or choose another name"
            ) from None
        try:
            held = os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            held = False
        if held:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        return held

    def release(self, *, remove: bool = False) -> None:
        """Release the lock; with `remove` also delete the lock file, and the folder if it is then empty."""
        if remove:
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(self._descriptor)
        if remove:
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()
