"""A lock on a work folder that allows one writer, also after a simultaneous start or a kill."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from minifloat.checkpoint.files import storage_errors
from minifloat.checkpoint.own_folder import OwnFolder
from minifloat.errors import DestinationError


class FolderLock:
    """An exclusive lock on a folder: an flock on a file in it, which the system releases when the process ends."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path, self._name = folder / name, name
        with storage_errors(self._path, "lock the work folder"):
            while True:
                created = False
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=stat.S_IRWXU)
                    created = True
                try:
                    self.folder = OwnFolder.open(folder, created=created)
                except FileNotFoundError:  # the previous owner has just removed the folder
                    continue
                try:
                    if self._lock():
                        return
                except BaseException:
                    self.folder.close()
                    raise
                self.folder.close()

    def _lock(self) -> bool:
        """Lock the file; return False if the previous owner has removed it, or the folder, meanwhile."""
        try:
            self._descriptor = self.folder.open_file(self._name, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            return False
        try:
            held = self._acquire()
        except BaseException:
            os.close(self._descriptor)
            raise
        if not held:
            os.close(self._descriptor)
        return held

    def _acquire(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._descriptor, 20, 0).decode("ascii", "replace").strip()
            raise DestinationError(
                f"{self._path.parent}: process {owner or 'unknown'} is writing here; wait for it or choose another name"
            ) from None
        try:
            status = os.stat(self._name, dir_fd=self.folder.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        held = os.path.samestat(os.fstat(self._descriptor), status)
        if held:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        return held

    def release(self, *, remove: bool = False) -> None:
        """Release the lock; with `remove` also delete the lock file, and the folder if it is then empty.

        An error is ignored: the end of the process releases the lock in any case.
        """
        if remove:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self.folder.descriptor)
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        with contextlib.suppress(OSError):
            self.folder.close()
        if remove:
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()
