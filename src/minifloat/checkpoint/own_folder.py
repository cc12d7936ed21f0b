"""`OwnFolder`: a work folder that belongs to this user, in which no name is followed out of it; and its lock.

Whoever guesses its name and plants a link in it must not have files of this user emptied or deleted: the folder is
opened once, all in it is reached by its descriptor without following links, and what is foreign is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from minifloat.checkpoint.files import read_exactly, storage_errors
from minifloat.errors import DestinationError

_CURE = "minifloat did not create it; move it away, or choose another name"
#: Errors of `os.open` with `O_NOFOLLOW` for a link, a file where a folder is expected, a folder or a socket.
_OTHER_KIND = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)


class OwnFolder:
    """An open folder of this user. All names are bare names of entries in it."""

    def __init__(self, path: Path, descriptor: int, owner: int) -> None:
        self.path, self.descriptor, self._owner = path, descriptor, owner

    @classmethod
    def open(cls, path: Path, *, created: bool = False) -> OwnFolder:
        descriptor = _open_folder(path, path)
        status = os.fstat(descriptor)
        if not created and status.st_uid != os.geteuid():
            os.close(descriptor)
            raise DestinationError(f"{path}: belongs to user {status.st_uid}, not to user {os.geteuid()}; {_CURE}")
        return cls(path, descriptor, status.st_uid)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def names(self) -> list[str]:
        with storage_errors(self.path, "list the folder"):
            return os.listdir(self.descriptor)  # noqa: PTH208  Path has no folder by descriptor

    def has(self, name: str) -> bool:
        """Return whether there is an entry of this name, of any kind."""
        with storage_errors(self.path / name, "look it up"):
            try:
                os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            except FileNotFoundError:
                return False
            return True

    def open_file(self, name: str, flags: int) -> int:
        """Return a descriptor of a regular file of this user that has no other name."""
        try:
            descriptor = os.open(
                name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=self.descriptor
            )
        except OSError as error:
            if error.errno in _OTHER_KIND:
                raise DestinationError(f"{self.path / name}: is not a regular file; {_CURE}") from None
            raise
        status = os.fstat(descriptor)
        reason = ""
        if not stat.S_ISREG(status.st_mode):
            reason = "is not a regular file"
        elif status.st_uid != self._owner:
            reason = f"belongs to user {status.st_uid}, the folder to user {self._owner}"
        elif status.st_nlink > 1:
            reason = "is a file that has other names too (hard links)"
        if reason:
            os.close(descriptor)
            raise DestinationError(f"{self.path / name}: {reason}; {_CURE}")
        return descriptor

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[int]:
        """Yield a descriptor for reading a file, which is closed afterwards."""
        try:
            descriptor = self.open_file(name, os.O_RDONLY)
        except FileNotFoundError:
            raise
        except OSError:
            with storage_errors(self.path / name, "open it"):
                raise
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, name: str, limit: int) -> bytes:
        with self.reading(name) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > limit:
                raise DestinationError(f"{self.path / name}: {size} bytes, at most {limit} are credible; {_CURE}")
            data = bytearray(size)
            read_exactly(descriptor, memoryview(data), 0, self.path / name)
        return bytes(data)

    def write(self, name: str, data: bytes) -> None:
        """Create a file, or empty one of this user, write it and sync it."""
        with (
            storage_errors(self.path / name, "write"),
            os.fdopen(self.open_file(name, os.O_WRONLY | os.O_CREAT), "wb") as file,
        ):
            file.truncate()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def folder(self, name: str) -> OwnFolder:
        """Open a folder in this folder; create it if it is missing."""
        path = self.path / name
        with storage_errors(path, "create the folder"):
            try:
                os.mkdir(name, dir_fd=self.descriptor)
            except FileExistsError:
                created = False
            else:
                created = True
            descriptor = _open_folder(name, path, self.descriptor)
        status = os.fstat(descriptor)
        if not created and status.st_uid != self._owner:
            os.close(descriptor)
            raise DestinationError(f"{path}: belongs to user {status.st_uid}, not to user {self._owner}; {_CURE}")
        return OwnFolder(path, descriptor, status.st_uid)

    def remove(self, name: str) -> None:
        """Delete an entry, if there is one: a folder with all that is in it, of a link only the link itself."""
        with storage_errors(self.path / name, "delete"):
            try:
                status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    shutil.rmtree(name, dir_fd=self.descriptor)
                else:
                    os.unlink(name, dir_fd=self.descriptor)
            except FileNotFoundError:
                return

    def move(self, name: str, target: OwnFolder, new_name: str) -> None:
        """Rename an entry into another folder, or within this one; a file of the new name is replaced."""
        os.rename(name, new_name, src_dir_fd=self.descriptor, dst_dir_fd=target.descriptor)

    def sync(self) -> None:
        """Sync the names in the folder, so that they survive a power cut."""
        with storage_errors(self.path, "sync the folder"):
            os.fsync(self.descriptor)


def _open_folder(name: str | Path, path: Path, parent: int | None = None) -> int:
    """Return a descriptor of a folder that is no link."""
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in _OTHER_KIND:
            raise DestinationError(f"{path}: the work goes into a folder of this name; {_CURE}") from None
        with storage_errors(path, "open the folder"):
            raise


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
        """Release the lock; with `remove` also delete the lock file, and the folder if it is then empty."""
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
