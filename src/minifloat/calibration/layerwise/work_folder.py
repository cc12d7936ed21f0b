"""The work folder of a run that goes layer by layer, from which a killed run continues.

The folder holds the hidden states that enter the next layer, and a file of results for each finished layer: the
statistics of a calibration, or the codes that rounding chose. Each has a file with its digest. A layer's results and
then their digest are written last, so a layer is finished exactly if both exist and agree; all other files of a killed
run are written again. Two runs cannot use one folder at a time, and a folder with files of any other kind is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from minifloat.checkpoint.digest import digest_file
from minifloat.checkpoint.files import parse_object, storage_errors
from minifloat.checkpoint.lock import FolderLock
from minifloat.checkpoint.own_folder import OwnFolder
from minifloat.errors import CheckpointError, DestinationError, StorageError

_LOG = logging.getLogger(__name__)

_LOCK = "lock"
_STATE = "calibration.json"
_STATE_LIMIT = 1 << 16  #: bytes
_DIGEST = ".digest"  #: ends the name of the file with the digest of a file
_DIGEST_LIMIT = 256  #: bytes
_ARGUMENTS = "arguments"
_DRAFT = "draft"
_REFERENCE = "reference"
_ROWS = "rows"
_CLOSINGS = "closings"
_SCRATCH = (_ARGUMENTS, _DRAFT, _REFERENCE, _ROWS, _CLOSINGS)
_OURS = re.compile(
    rf"{_LOCK}|{_STATE}|{'|'.join(_SCRATCH)}|(hidden-\d+|layer-\d+\.safetensors)({re.escape(_DIGEST)})?"
    r"|\.layer-\d+\.safetensors\.\d+\.tmp"
)


Result = TypeVar("Result")


class WorkFolder(Generic[Result]):
    """The work folder, locked while it is open. A context manager; leaving it keeps the files."""

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        read: Callable[[Path], Result],
        write: Callable[[Result, Path], object],
    ) -> None:
        self.path, self._read, self._write = path, read, write
        if os.path.lexists(path):
            with contextlib.closing(OwnFolder.open(path)) as folder:
                foreign = sorted(name for name in folder.names() if not _OURS.fullmatch(name))
            if foreign:
                raise DestinationError(
                    f"{path / foreign[0]} is not the work of a run over layers; choose another folder, or delete it"
                )
        self._lock: FolderLock | None = FolderLock(path, _LOCK)
        self.finished: list[Result] = []
        try:
            self._resume(fingerprint)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> WorkFolder[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    @property
    def arguments(self) -> Path:
        """The file for arguments of layers; a resumed run computes them again."""
        return self.path / _ARGUMENTS

    @property
    def draft(self) -> Path:
        """The file for hidden states while they are written."""
        return self.path / _DRAFT

    @property
    def reference(self) -> Path:
        """The file for inputs inside the current layer of the original model."""
        return self.path / _REFERENCE

    @property
    def rows(self) -> Path:
        """The file for inputs of the experts of the current layer."""
        return self.path / _ROWS

    @property
    def closings(self) -> Path:
        """The file for inputs of the last linears of modules of the current layer, in the quantized model."""
        return self.path / _CLOSINGS

    def hidden(self, layer: int) -> Path:
        """The file of the hidden states that enter a layer."""
        return self.path / f"hidden-{layer}"

    def continues(self) -> bool:
        """Return whether the hidden states that enter the first unfinished layer are there, as they were written.

        All work is deleted if they are not, since only the first layer can be computed without them.
        """
        is_whole = self._is_whole(self.hidden(len(self.finished)).name)
        if not is_whole:
            self.restart()
        return is_whole

    def keep_draft(self, layer: int) -> None:
        """Rename the draft, which must be synced, to the hidden states that enter a layer."""
        self._write_digest(_DRAFT, self.hidden(layer).name)
        with storage_errors(self.draft, "rename"):
            self._folder.move(_DRAFT, self._folder, self.hidden(layer).name)
        self._folder.sync()

    def finish(self, layer: int, result: Result) -> None:
        """Record a layer as finished, and delete the hidden states that entered it."""
        results = self.results(layer)
        self._write(result, results)
        self._write_digest(results.name, results.name)
        self._folder.sync()
        self.finished.append(self._read(results))
        for name in (self.hidden(layer).name, self.hidden(layer).name + _DIGEST):
            self._folder.remove(name)

    def restart(self) -> None:
        """Delete all work."""
        self.finished = []
        for name in self._folder.names():
            if name not in (_LOCK, _STATE):
                self._folder.remove(name)

    def remove(self) -> None:
        """Delete the folder; no method may be called afterwards."""
        self.restart()
        self._folder.remove(_STATE)
        if self._lock is not None:
            self._lock.release(remove=True)
            self._lock = None

    def results(self, layer: int) -> Path:
        """The file of the results of a layer, which exists once the layer is finished."""
        return self.path / f"layer-{layer}.safetensors"

    def _resume(self, fingerprint: str) -> None:
        """Load the finished layers of earlier work with the same fingerprint; delete any other work."""
        folder = self._folder
        for name in folder.names():
            if name.startswith(".") or name in _SCRATCH:
                folder.remove(name)
            else:
                with storage_errors(self.path / name, "open it"):
                    os.close(folder.open_file(name, os.O_RDONLY))  # what is no file of this user is refused
        earlier = self._read_fingerprint()
        if earlier != fingerprint:
            if earlier is not None:
                _LOG.warning("%s: the model, the data or the options changed: earlier work is not continued", self.path)
            self.restart()
            folder.write(_DRAFT, json.dumps({"fingerprint": fingerprint}).encode())
            with storage_errors(self.path / _STATE, "write"):
                folder.move(_DRAFT, folder, _STATE)
            folder.sync()
        while self._is_whole((results := self.results(len(self.finished))).name):
            try:
                self.finished.append(self._read(results))
            except CheckpointError:
                break

    def _write_digest(self, name: str, final_name: str) -> None:
        """Write the digest of a file that has, or will get, its final name."""
        self._folder.write(final_name + _DIGEST, self._digest(name).encode())

    def _is_whole(self, name: str) -> bool:
        """Return whether there is a file with the digest that was written for it; warn of one with another."""
        try:
            stated = self._folder.read(name + _DIGEST, _DIGEST_LIMIT)
            found = self._digest(name).encode()
        except FileNotFoundError:
            return False
        if found != stated:
            _LOG.warning(
                "%s holds other bytes than were written: check the disk. It is computed again", self.path / name
            )
        return found == stated

    def _digest(self, name: str) -> str:
        with self._folder.reading(name) as descriptor, storage_errors(self.path / name, "read"):
            return digest_file(descriptor)

    def _read_fingerprint(self) -> str | None:
        """Return the fingerprint of earlier work; None if there is none, or it cannot be read."""
        try:
            state = parse_object(self._folder.read(_STATE, _STATE_LIMIT), self.path / _STATE, CheckpointError)
        except (FileNotFoundError, StorageError, CheckpointError):
            return None
        fingerprint = state.get("fingerprint")
        return fingerprint if isinstance(fingerprint, str) else None

    @property
    def _folder(self) -> OwnFolder:
        if self._lock is None:
            raise AssertionError("the work folder is closed")
        return self._lock.folder
