"""The work of a walk over layers, from which a killed run continues.

The work folder holds the hidden states that enter the next layer, and a file of results for each finished layer: the
statistics of a calibration, the codes that rounding chose, or Hessians.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from minifloat.checkpoint.array_file import ArrayContent, ArrayFile, ArrayFormat, read_arrays, write_arrays
from minifloat.checkpoint.files import storage_errors
from minifloat.checkpoint.journal import WorkFolder, written_file
from minifloat.errors import CheckpointError

_LOG = logging.getLogger(__name__)

_SCRATCH = ".scratch"  #: ends the names of files that a resumed run writes again
_DRAFT = f"hidden{_SCRATCH}"
_OURS = re.compile(rf"\w+{re.escape(_SCRATCH)}|hidden-\d+|layer-\d+\.safetensors|\.layer-\d+\.safetensors\.\d+\.tmp")


class LayerWork:
    """The hidden states and results in a work folder, locked while it is open."""

    def __init__(self, path: Path, fingerprint: str, kind: ArrayFormat) -> None:
        self.path, self._fingerprint, self._kind = path, fingerprint, kind
        self._work = WorkFolder(path, lambda name: _OURS.fullmatch(name) is not None)
        self.finished: list[ArrayFile] = []  # the results of the finished layers, in order
        try:
            self._resume()
        except BaseException:
            self._work.close()
            raise

    def __enter__(self) -> LayerWork:
        return self

    def __exit__(self, *_: object) -> None:
        self._work.close()

    def scratch(self, name: str) -> Path:
        """Return the path of a file that a resumed run writes again."""
        return self.path / f"{name}{_SCRATCH}"

    @property
    def draft(self) -> Path:
        """The file for hidden states while they are written."""
        return self.path / _DRAFT

    def hidden(self, layer: int) -> Path:
        """The file of the hidden states that enter a layer."""
        return self.path / f"hidden-{layer}"

    def results(self, layer: int) -> Path:
        """The file of the results of a layer, which exists once the layer is finished."""
        return self.path / f"layer-{layer}.safetensors"

    def continues(self) -> bool:
        """Return whether the hidden states that enter the first unfinished layer are there, as they were written."""
        if self.hidden(len(self.finished)).name in self._work.finished:
            return True
        self._restart()
        return False

    def keep_draft(self, layer: int) -> None:
        """Rename the draft, which must be synced, to the hidden states that enter a layer."""
        folder, name = self._work.folder, self.hidden(layer).name
        with storage_errors(self.draft, "rename"):
            folder.move(_DRAFT, folder, name)
        folder.sync()
        self._work.finish(name, written_file(folder, name))

    def finish(self, layer: int, content: ArrayContent) -> None:
        """Record a layer as finished, and delete the hidden states that entered it."""
        results, hidden = self.results(layer), self.hidden(layer).name
        write_arrays(results, self._kind, content)
        self._work.folder.sync()
        self._work.finish(results.name, written_file(self._work.folder, results.name))
        self.finished.append(read_arrays(results, self._kind))
        if hidden in self._work.finished:
            self._work.discard(hidden)
        self._work.folder.remove(hidden)

    def remove(self) -> None:
        """Delete the folder; no method may be called afterwards."""
        self.finished = []
        self._work.empty()
        self._work.close()

    def _restart(self) -> None:
        self.finished = []
        self._work.clear(self._fingerprint)

    def _resume(self) -> None:
        """Load the finished layers of earlier work with the same fingerprint; delete any other work."""
        work, folder = self._work, self._work.folder
        if work.resume(self._fingerprint):
            _LOG.warning("%s: the model, the data or the options changed: earlier work is not continued", self.path)
        work.load(folder)
        for name, reason in work.damaged.items():
            if folder.has(name):
                _LOG.warning("%s %s: check the disk. It is computed again", self.path / name, reason)
        while (results := self.results(len(self.finished))).name in work.finished:
            try:
                self.finished.append(read_arrays(results, self._kind))
            except CheckpointError:
                break
        kept = {self.results(layer).name for layer in range(len(self.finished))}
        for name in folder.names():
            if _OURS.fullmatch(name) and name not in (
                kept | {self.hidden(len(self.finished)).name} & work.finished.keys()
            ):
                folder.remove(name)
