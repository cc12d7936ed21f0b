"""Safe opening of untrusted files, and errors of the operating system turned into messages with a cure.

Links of a model folder may point at a password file, a FIFO would block the reader, a config may have a terabyte.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint.layout import GGUF_HINT, is_gguf
from minifloat.errors import CheckpointError, NotACheckpointError, StorageError, UnsafeFileError

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]

_CURES = {
    errno.ENOSPC: "free some space or choose a destination on another disk, then run the same command again",
    errno.EDQUOT: "your disk quota is used up: free some space, then run the same command again",
    errno.EFBIG: "the file size limit of this system or of `ulimit -f` is too small for this file",
    errno.EACCES: "check the permissions of the file and of its folder",
    errno.EPERM: "check the permissions of the file and of its folder",
    errno.EROFS: "this file system is read-only: choose a destination on another one",
    errno.EIO: "the disk reports a fault: check it, or use another one",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENOLCK: "this file system has no locks: choose a destination on a local disk",
    errno.ENOSYS: "this file system lacks an operation that is needed: choose a destination on a local disk",
    errno.EOPNOTSUPP: "this file system lacks an operation that is needed: choose a destination on a local disk",
    errno.ENAMETOOLONG: "choose a shorter name",
}


@contextlib.contextmanager
def storage_errors(path: Path, action: str) -> Iterator[None]:
    """Convert an OSError of the block to a StorageError that names file, action, reason and cure."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        cure = _CURES.get(error.errno or 0, "see the reason given by the system")
        raise StorageError(f"{path}: cannot {action}: {reason}; {cure}") from error


def is_safe_name(name: str) -> bool:
    """Return whether `name` is the bare name of a file: no folder, no `..`, no NUL."""
    return bool(name) and name not in (".", "..") and not any(char in name for char in "/\\\0")


def resolve_inside(root: Path, name: str) -> Path:
    """Return the path of `name` below `root`; its links stay inside, or in the model's blobs in the hub's cache."""
    parts = PurePosixPath(name).parts
    if not parts or not all(map(is_safe_name, parts)):
        raise UnsafeFileError(root, f"file name {name!r} leaves the folder; only plain names are accepted")
    path = root.joinpath(*parts)
    with storage_errors(path, "follow the link"):
        try:
            target = path.resolve()
        except RuntimeError:  # Python < 3.13 reports a loop of links this way
            raise UnsafeFileError(path, "the link points to itself") from None
    if target.is_relative_to(root):
        return path
    if _is_hub_snapshot(root) and target.parent == root.parent.parent / "blobs":
        return path
    raise UnsafeFileError(path, f"the link leaves the folder: it points to {target}; put the file itself there")


def _is_hub_snapshot(root: Path) -> bool:
    return root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")


def open_regular(path: Path) -> tuple[int, os.stat_result]:
    """Return a read-only descriptor of a regular file, and its status."""
    try:
        # O_NONBLOCK: opening a FIFO would otherwise wait for a writer that never comes.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP):  # a socket; links in a circle
            raise UnsafeFileError(path, "not a regular file") from None
        with storage_errors(path, "open it"):
            raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise UnsafeFileError(path, "not a regular file")
    return descriptor, status


def read_exactly(descriptor: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` with the bytes of the file from `offset` on. Thread-safe."""
    with storage_errors(path, "read"):
        while view:
            # A single call moves at most 2 GiB.
            count = os.preadv(descriptor, [view], offset)
            if count == 0:
                raise StorageError(
                    f"{path}: the file ends at byte {offset}, {len(view)} bytes early: it changed while it was read"
                )
            view, offset = view[count:], offset + count


def read_small(root: Path, name: str, limit: int, error: type[CheckpointError]) -> bytes:
    path = resolve_inside(root, name)
    descriptor, status = open_regular(path)
    try:
        if status.st_size > limit:
            raise error(path, f"{status.st_size} bytes; at most {limit} are credible for this file")
        data = bytearray(status.st_size)
        read_exactly(descriptor, memoryview(data), 0, path)
    finally:
        os.close(descriptor)
    return bytes(data)


def refuse_irregular(root: Path, names: Iterable[str]) -> None:
    """Raise unless files of a checkpoint, if they exist, are regular; for libraries that open them without looking."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.close(open_regular(resolve_inside(root, name))[0])


def parse_object(
    data: bytes,
    path: Path,
    error: type[CheckpointError],
    loads: Callable[[str], Any] = json.loads,
    *,
    surrogates: bool = False,
) -> dict[str, Any]:
    try:
        loaded = loads(data.decode("utf-8"))
        if not surrogates and b"\\u" in data:
            json.dumps(loaded, ensure_ascii=False).encode()  # an escape can spell half a surrogate pair
    except RecursionError:
        raise error(path, "nested too deeply") from None
    except UnicodeError as reason:
        raise error(path, f"not UTF-8: {reason}") from None
    except ValueError as reason:  # including JSONDecodeError
        raise error(path, f"not valid JSON: {reason}") from None
    if not isinstance(loaded, dict):
        raise error(path, f"expected a JSON object, found {type(loaded).__name__}")
    return loaded


def byte_view(buffer: Buffer) -> memoryview:
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty view cannot be cast


def list_folder(path: Path) -> list[str]:
    with storage_errors(path, "list the folder"):
        return [entry.name for entry in path.iterdir()]


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Replace a file atomically: the block writes a temporary file, which is then synced and renamed to `path`."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors(path, "write"):
        try:
            with open(draft, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:  # including Ctrl-C
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
    sync_folder(path.parent)


def require_space(folder: Path, nbytes: int, destination: Path) -> None:
    """Raise StorageError unless the disk of a folder has room for the bytes that are missing of an output."""
    with storage_errors(folder, "read the free space"):
        free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise StorageError(
            f"{destination}: the output needs {nbytes:,} bytes, the disk has {free:,} bytes free; free some space or "
            "choose a destination on another disk"
        )


def sync_folder(path: Path) -> None:
    """Sync a folder, so that the names in it survive a power cut."""
    with storage_errors(path, "sync the folder"):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def resolve_folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    try:
        root = folder.resolve(strict=True)
    except FileNotFoundError:
        raise NotACheckpointError(
            folder, "no such folder; download the model first (`hf download ORG/NAME --local-dir FOLDER`)"
        ) from None
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links; ValueError: a NUL
        raise NotACheckpointError(folder, f"not a usable path: {error}") from None
    if not root.is_dir():
        if is_gguf(folder.name):
            raise NotACheckpointError(folder, GGUF_HINT)
        raise NotACheckpointError(folder, "not a folder; give the folder that holds config.json")
    return root


try:
    from blake3 import blake3

    ALGORITHM = "blake3"
except ImportError:  # minifloat runs from its source tree without its dependencies, as on machines for GPU tests
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
    return hashlib.sha256() if ALGORITHM == "sha256" else blake3(max_threads=blake3.AUTO if parallel else 1)


def digest_bytes(data: Any, *, parallel: bool = False) -> bytes:
    hasher = new_hasher(parallel=parallel)
    hasher.update(data)
    return hasher.digest()


def name_digest(hasher: Hasher) -> str:
    """Return the digest with the name of its algorithm: ``"blake3:..."``."""
    return f"{ALGORITHM}:{hasher.hexdigest()}"


def combine(digests: Iterable[tuple[str, str]]) -> str:
    """Return one digest for ``(name, digest)`` pairs; their order, and so the sharding of a model, does not matter."""
    hasher = new_hasher()
    hasher.update(json.dumps(sorted(digests)).encode())
    return name_digest(hasher)
