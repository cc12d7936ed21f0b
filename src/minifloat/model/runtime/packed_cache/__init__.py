"""Packed weights kept on disk: a server maps them at its next start, instead of reading and packing a checkpoint.

    folder.py      who may write to the folder and to the files in it
    identity.py    what a cache was made from
    container.py   the format of a file, and its checks

A file is used only if its header names this version of minifloat, the same options and the same checkpoint, and if all
its bytes have the digest that was written. Otherwise the weights are packed again, and the file is replaced. All of it
runs without torch, so that `begin` can check a cache while the process still imports torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from minifloat.checkpoint import Checkpoint
from minifloat.errors import CheckpointError, StorageError
from minifloat.model.runtime.packed_cache.container import Container, Contents, UnusableCache, read, write
from minifloat.model.runtime.packed_cache.folder import open_folder
from minifloat.model.runtime.packed_cache.identity import identity

__all__ = ["Container", "Contents", "PackedCache", "UnusableCache", "begin"]

_LOG = logging.getLogger(__name__)
_MIB = 1 << 20


class PackedCache:
    """The packed weights of one checkpoint with one set of options, in a folder of such caches."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, *, dtype: str | None, lm_head: str) -> None:
        options = {"dtype": dtype, "lm_head": lm_head}
        key = hashlib.sha256(json.dumps([str(checkpoint.path), options]).encode()).hexdigest()[:16]
        self._name = f"{checkpoint.path.name}-{key}.packed"
        self._path = folder / self._name
        self._stated = {"options": options, "source": identity(checkpoint)}
        self._folder = open_folder(folder)

    def __enter__(self) -> PackedCache:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)

    def map(self) -> Container:
        """Return the file if its header fits; its weights are not verified yet."""
        return read(self._folder, self._name, self._stated)

    def load(self) -> Container | None:
        """Return the verified file, or None; a file that does not fit, or is damaged, is named in the log."""
        try:
            container = _verified_ahead(self)
            if container is None:
                container = self.map()
                container.verify()
        except FileNotFoundError:
            return None
        except UnusableCache as error:
            self.refuse(error)
            return None
        _LOG.info("packed weights: mapped %s, %.1f MiB", self._path, container.nbytes / _MIB)
        return container

    def refuse(self, error: UnusableCache) -> None:
        """Log why the file is not used."""
        _LOG.warning("the packed weights in %s are not used and made again, because %s", self._path, error)

    def store(self, contents: Mapping[str, Contents]) -> None:
        """Write the file; if the system refuses, say so in the log and go on without."""
        started = time.perf_counter()
        try:
            nbytes = write(self._folder, self._name, self._stated, contents)
        except OSError as error:
            _LOG.warning("the packed weights are not kept: cannot write %s: %s", self._path, error.strerror)
            return
        seconds = time.perf_counter() - started
        _LOG.info("packed weights: wrote %s, %.1f MiB in %.1f s", self._path, nbytes / _MIB, seconds)

    def is_for(self, other: PackedCache) -> bool:
        """Return whether both are the same file of the same checkpoint."""
        return (self._path, self._stated) == (other._path, other._stated)


class _Ahead:
    """A cache that a thread verifies."""

    def __init__(self, cache: PackedCache, container: Container) -> None:
        self.cache, self._container = cache, container
        self._error: UnusableCache | None = None
        self._thread = threading.Thread(target=self._verify, name="minifloat-packed-cache", daemon=True)
        self._thread.start()

    def container(self) -> Container:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._container

    def _verify(self) -> None:
        try:
            self._container.verify()
        except UnusableCache as error:
            self._error = error


_lock = threading.Lock()
_ahead: _Ahead | None = None


def begin(folder: Path, model: Path, *, dtype: str | None, lm_head: str) -> bool:
    """Begin to verify the packed weights that `PackedCache.load` will return, and return whether there are any."""
    global _ahead
    try:
        with (
            Checkpoint.open(model) as checkpoint,
            PackedCache(folder, checkpoint, dtype=dtype, lm_head=lm_head) as cache,
        ):
            ahead = _Ahead(cache, cache.map())
    except (FileNotFoundError, UnusableCache, CheckpointError, StorageError):
        return False  # whoever opens the model says what is wrong
    with _lock:
        _ahead = ahead
    return True


def _verified_ahead(cache: PackedCache) -> Container | None:
    """Return the container that `begin` verified for a cache; None if there is none."""
    global _ahead
    with _lock:
        ahead, _ahead = _ahead, None
    return ahead.container() if ahead is not None and ahead.cache.is_for(cache) else None
