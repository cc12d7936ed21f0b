"""A transactional writer of checkpoints: the output appears whole or not at all, and a killed run can be resumed.

One atomic rename of `output/` finishes the job:

    DESTINATION.minifloat-work/
        lock                    held by the process that is writing
        minifloat-journal.jsonl the fingerprint of the output; the finished shards, each with the caller's record
        output/                 shards under their final names; this folder becomes the destination
        pending/                config.json, index and other small files, which move to output/ at the very end
        replaced/               the previous destination, during the instant of an overwrite

A run resumes an earlier one of the same fingerprint, and writes again what does not hold what was written. Not
supported: several processes that share the work, and file systems without `flock` or atomic renames.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from minifloat.checkpoint.files import is_safe_name, list_folder, require_space, storage_errors, sync_folder
from minifloat.checkpoint.journal import WorkFolder, WrittenFile
from minifloat.checkpoint.layout import CONFIG_FILE, SHARD_SUFFIX
from minifloat.checkpoint.own_folder import OwnFolder
from minifloat.checkpoint.reader import Checkpoint
from minifloat.checkpoint.schema import Check, any_object
from minifloat.checkpoint.shard import ShardWriter
from minifloat.checkpoint.tensors import OutputTensor
from minifloat.errors import DestinationError, StorageError

_Used = TypeVar("_Used")

_LOG = logging.getLogger(__name__)

WORK_SUFFIX = ".minifloat-work"

_OUTPUT = "output"
_PENDING = "pending"
_REPLACED = "replaced"
_OURS = frozenset((_OUTPUT, _PENDING, _REPLACED))


class CheckpointWriter:
    """Writes a checkpoint as one transaction. A context manager; an exit without `commit` keeps the work folder."""

    def __init__(
        self,
        destination: str | os.PathLike[str],
        *,
        fingerprint: str,
        total_bytes: int,
        overwrite: bool = False,
        check_record: Check = any_object,
    ) -> None:
        """Lock the work folder, and resume an interrupted run with the same fingerprint."""
        self.destination = Path(destination).absolute()
        if self.destination.name in ("", "..") or not self.destination.parent.is_dir():
            raise DestinationError(f"{destination}: the folder to create it in does not exist; create that one first")
        self.work = self.destination.with_name(self.destination.name + WORK_SUFFIX)
        self.restarted_because: str | None = None
        self._overwrite = overwrite
        self._check_record = check_record
        self._mutex = threading.Lock()
        self._open_shards: dict[str, ShardWriter] = {}
        self._resumed = False
        self._folder: WorkFolder | None = None
        self._output: OwnFolder | None = None
        try:
            self._claim()
            self._resume(fingerprint)
            self._check_space(total_bytes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def finished(self) -> dict[str, dict[str, Any]]:
        """The records of the finished shards, by file name."""
        return self._work.finished

    @property
    def damaged(self) -> dict[str, str]:
        """Why shards of the earlier run are written again, by file name."""
        return self._work.damaged

    def close(self) -> None:
        """Stop writing and release the lock. Finished shards stay in the work folder, so that a run can resume."""
        with self._mutex:
            shards, self._open_shards = self._open_shards, {}
            output, self._output = self._output, None
        if self._folder is None or not self._folder.is_open:
            return
        with contextlib.suppress(OSError, StorageError):
            for shard in shards.values():
                shard.abandon()  # it cannot be resumed
            if self._resumed and not self._folder.finished:
                self._folder.empty()
        with contextlib.suppress(OSError):
            if output:
                output.close()
        self._folder.close()

    def shard(self, file_name: str, tensors: Sequence[OutputTensor], metadata: Mapping[str, str]) -> ShardWriter:
        if not is_safe_name(file_name) or not file_name.endswith(SHARD_SUFFIX) or file_name in self.finished:
            raise AssertionError(f"{file_name!r} is not the name of a shard that is still to be written")

        output = self._require_output()

        def journal(written: WrittenFile, record: dict[str, Any]) -> None:
            output.sync()
            self._work.finish(file_name, written, record)
            with self._mutex:
                self._open_shards.pop(file_name, None)

        shard = ShardWriter(output, file_name, tensors, metadata, journal)
        with self._mutex:
            self._open_shards[file_name] = shard
        return shard

    def discard(self, file_name: str) -> None:
        """Delete a finished shard whose source changed; it can be written again."""
        self._work.discard(file_name)
        self._require_output().remove(file_name)

    def start_over(self, because: str) -> None:
        """Delete all finished shards, because the source changed or cannot be used."""
        for file_name in list(self.finished):
            self.discard(file_name)
        self.restarted_because = because

    def write_file(self, name: str, data: bytes) -> None:
        parts = PurePosixPath(name).parts
        if not parts or not all(map(is_safe_name, parts)) or name.endswith(SHARD_SUFFIX):
            raise AssertionError(f"{name!r} is not the relative name of a small file")
        with contextlib.ExitStack() as stack:
            folder = self._work.folder
            for part in (_PENDING, *parts[:-1]):
                folder = folder.folder(part)
                stack.callback(folder.close)
            folder.write(parts[-1], data)
            folder.sync()

    def commit(self) -> Path:
        """Move the complete output to the destination."""
        if self._open_shards:
            raise AssertionError(f"unfinished shards: {', '.join(self._open_shards)}")
        self._join_pending()
        unused = Checkpoint.open_unfinished(self.work / _OUTPUT).ignored_files  # guards against bugs of the caller
        if unused:
            raise AssertionError(f"shards that the index does not name: {', '.join(unused)}")
        self._require_destination()
        work = self._work.folder
        with storage_errors(self.destination, "put the finished output in place"):
            try:
                if os.path.lexists(self.destination):
                    os.rename(self.destination, _REPLACED, dst_dir_fd=work.descriptor)
                os.rename(_OUTPUT, self.destination, src_dir_fd=work.descriptor)
            except BaseException:  # including Ctrl-C
                if work.has(_REPLACED) and not os.path.lexists(self.destination):
                    os.rename(_REPLACED, self.destination, src_dir_fd=work.descriptor)
                raise
        self._clean_up()
        return self.destination

    def use_up(self, use: Callable[[Path], _Used]) -> _Used:
        """Return what `use` makes of the folder of the complete output, which is deleted then in place of a commit."""
        self._join_pending()
        used = use(self.work / _OUTPUT)
        self._clean_up()
        return used

    def _clean_up(self) -> None:
        """Remove the work folder of a complete output; a refusal of the operating system is no failure of the run."""
        try:
            sync_folder(self.destination.parent)
            self._work.empty()
        except StorageError as error:
            _LOG.warning("%s is complete, but not all of %s could be removed: %s", self.destination, self.work, error)
        self.close()

    def _join_pending(self) -> None:
        """Move the small files beside the shards, config.json last, and sync all folders."""
        output = self._require_output()
        with contextlib.closing(self._work.folder.folder(_PENDING)) as pending:
            for name in sorted(pending.names(), key=lambda name: (name == CONFIG_FILE, name)):
                with storage_errors(output.path / name, "complete the output"):
                    pending.move(name, output, name)
        output.sync()

    @staticmethod
    def check_destination(destination: str | os.PathLike[str], *, overwrite: bool) -> None:
        """Refuse a destination that a writer would refuse; call it before work that takes long."""
        path = Path(destination).absolute()
        if path.name in ("", "..") or not path.parent.is_dir():
            raise DestinationError(f"{destination}: the folder to create it in does not exist; create that one first")
        free = overwrite or not os.path.lexists(path) or _is_empty_folder(path)
        if not free and not path.with_name(path.name + WORK_SUFFIX).exists():
            raise DestinationError(f"{path}: exists already; choose another name or use --overwrite")

    def _claim(self) -> None:
        """Take the lock, undo or finish the commit of a killed run, and check the destination."""
        if os.path.lexists(self.work):
            self._folder = WorkFolder(self.work, _OURS.__contains__)
            self._recover_commit()
        self._require_destination()
        if self._folder is None:
            self._folder = WorkFolder(self.work, _OURS.__contains__)

    def _recover_commit(self) -> None:
        work = self._work.folder
        if not os.path.lexists(self.destination):
            if work.has(_REPLACED):
                work.folder(_REPLACED).close()  # a link is refused
                with storage_errors(self.destination, "undo an interrupted overwrite"):
                    os.rename(_REPLACED, self.destination, src_dir_fd=work.descriptor)
        elif not work.has(_OUTPUT):
            self._work.empty()
        elif work.has(_REPLACED):
            raise DestinationError(
                f"{work.path / _REPLACED}: the former content of {self.destination}, from an interrupted overwrite, "
                "cannot go back because something new is there; move it away"
            )

    def _require_destination(self) -> None:
        """Raise unless the destination does not exist, is an empty folder, or may be replaced."""
        if not os.path.lexists(self.destination) or _is_empty_folder(self.destination):
            return
        if not self._overwrite:
            raise DestinationError(f"{self.destination}: exists already; choose another name or use --overwrite")
        if self.destination.is_symlink() or not self.destination.is_dir():
            raise DestinationError(f"{self.destination}: is not a folder and is not overwritten; choose another name")
        names = list_folder(self.destination)
        if names and CONFIG_FILE not in names:
            raise DestinationError(
                f"{self.destination}: holds files but no {CONFIG_FILE}, so it is no model and is not overwritten; "
                "choose another name"
            )

    def _resume(self, fingerprint: str) -> None:
        """Load the finished shards of an earlier run with the same fingerprint, or start over."""
        self.restarted_because = self._work.resume(fingerprint)
        work = self._work.folder
        self._output = work.folder(_OUTPUT)
        self._work.load(self._output, self._check_record)
        for name in self._output.names():
            if name not in self.finished:
                self._output.remove(name)
        work.remove(_PENDING)
        work.folder(_PENDING).close()
        work.sync()
        sync_folder(self.work.parent)
        self._resumed = True

    def _check_space(self, total_bytes: int) -> None:
        with storage_errors(self.work, "read the free space"):
            done = sum((self.work / _OUTPUT / name).lstat().st_size for name in self.finished)
        require_space(self.work, total_bytes - done, self.destination)

    @property
    def _work(self) -> WorkFolder:
        if self._folder is None:
            raise AssertionError("the writer is closed")
        return self._folder

    def _require_output(self) -> OwnFolder:
        if self._output is None:
            raise AssertionError("the writer is closed")
        return self._output


def _is_empty_folder(path: Path) -> bool:
    """Return whether this is a folder, no link to one, that holds nothing; an output may take its place."""
    return path.is_dir() and not path.is_symlink() and not list_folder(path)
