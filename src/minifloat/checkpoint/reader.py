"""A validating reader of model folders: config, index and all headers are checked before any tensor is read.

No memory maps, because a mapped file that shrinks kills the process; no pickle files, because they can run code.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint.config_schema import check_config, check_quantization
from minifloat.checkpoint.files import (
    byte_view,
    list_folder,
    open_regular,
    parse_object,
    read_exactly,
    read_small,
    resolve_folder,
    resolve_inside,
    storage_errors,
)
from minifloat.checkpoint.header import ShardHeader, check_index, read_header, read_index, shard_names
from minifloat.checkpoint.layout import (
    CONFIG_FILE,
    GGUF_HINT,
    HF_QUANT_CONFIG_FILE,
    INDEX_FILE,
    JOURNAL_FILE,
    SIDECAR_FOLDER,
    is_gguf,
    is_module_folder,
    is_sidecar,
    is_weights,
)
from minifloat.checkpoint.tensors import TensorInfo
from minifloat.errors import ConfigError, NotACheckpointError, ShardIndexError, StorageError, UnsafeFileError

#: Distance between a range that is read and the range that the operating system fetches meanwhile.
READ_AHEAD_BYTES = 32 << 20
_CONFIG_LIMIT = 16 * 2**20
_SIDECAR_LIMIT = 2**30


class _Shard(NamedTuple):
    """A shard when its header was read; `stamp` is its size and modification time, None for a remote shard."""

    header: ShardHeader
    stamp: tuple[int, int] | None


class Checkpoint:
    """A validated model folder: config and tensors. A context manager; `Checkpoint.open` creates it.

    Attributes:
        path: The folder, links resolved.
        config: The content of config.json.
        quantization_config: The quantization config in config.json or in ModelOpt's hf_quant_config.json; None for a
            model that is not quantized.
        tensors: Tensors by name, ordered by shard, then by offset.
        shards: File names of the shards, sorted.
        metadata: The free-form strings in the header of each shard.
        ignored_files: Files of weights that the model does not use.
        name: Name of the model, where it is not that of the folder.
    """

    name: str | None = None

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        quantization_config: dict[str, Any] | None,
        shards: Mapping[str, _Shard],
        ignored_files: tuple[str, ...],
    ) -> None:
        self.path = path
        self.config = config
        self.quantization_config = quantization_config
        self.shards = tuple(shards)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {info.name: info for shard in shards.values() for info in shard.header.tensors}
        )
        self.metadata: Mapping[str, Mapping[str, str]] = MappingProxyType(
            {name: shard.header.metadata for name, shard in shards.items()}
        )
        self.ignored_files = ignored_files
        self._stamps = {name: shard.stamp for name, shard in shards.items()}
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read and check config, index and headers.

        Raises:
            CheckpointError: If the folder is not a model, or a file in it is invalid.
            StorageError: If the operating system refuses a read.
        """
        root = resolve_folder(path)
        with storage_errors(root, "search the folder"):
            unfinished = (root / JOURNAL_FILE).exists() or (root.parent / JOURNAL_FILE).exists()
        if unfinished:
            raise NotACheckpointError(
                root, "interrupted minifloat output; run the same command again to finish it, or delete the folder"
            )
        return cls.open_unfinished(root)

    @classmethod
    def open_unfinished(cls, root: Path) -> Checkpoint:
        """Open, as `open` does, an output that a writer has not yet renamed to its destination; `root` is resolved."""
        return cls._open(root, sorted(list_folder(root)), lambda name: _read_shard(root, name))

    @classmethod
    def open_headers(cls, root: Path, names: Collection[str], read: Callable[[str], ShardHeader]) -> Checkpoint:
        """Open a model by headers that `read` gets; `root` has config.json and the index, `names` are all files."""
        return cls._open(root, sorted(names), lambda name: _Shard(read(name), None))

    @classmethod
    def _open(cls, root: Path, names: list[str], read: Callable[[str], _Shard]) -> Checkpoint:
        config = read_config(root)
        weight_map = read_index(root)
        shards = {name: read(name) for name in shard_names(root, names, weight_map)}
        if weight_map is not None:
            check_index(weight_map, {name: shard.header.tensors for name, shard in shards.items()}, root / INDEX_FILE)
        ignored = tuple(name for name in names if is_weights(name) and name not in shards)
        return cls(root, config, _quantization_config(root, config), shards, ignored)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. No thread may be reading, and later reads raise an error."""
        with self._lock:
            self._closed = True
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    @property
    def readable(self) -> bool:
        """Whether tensors can be read; False for a checkpoint of `open_headers`."""
        return all(stamp is not None for stamp in self._stamps.values())

    def stored_bytes(self, info: TensorInfo) -> int:
        """Return the bytes that a tensor takes on disk."""
        return info.nbytes

    def read_into(self, info: TensorInfo, buffer: memoryview | npt.NDArray[np.uint8], start: int = 0) -> None:
        """Fill `buffer` with the bytes of a tensor from byte `start` on. Thread-safe.

        Args:
            info: One of `tensors`.
            buffer: Writable and contiguous; its size is the number of bytes to read.
            start: First byte, counted from the start of the tensor.

        Raises:
            ValueError: If the range exceeds the tensor, or the checkpoint is closed.
            StorageError: If the operating system refuses, or the file has changed since it was opened.
        """
        view = byte_view(buffer)
        if start < 0 or start + len(view) > info.nbytes:
            raise ValueError(f"{info.name}: bytes {start} to {start + len(view)} of a tensor of {info.nbytes}")
        descriptor, offset = self._descriptor(info.shard), info.offset + start
        _read_ahead(descriptor, offset, len(view))
        read_exactly(descriptor, view, offset, self.shard_path(info.shard))

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """Return all bytes of a tensor, uint8 ``[nbytes]``."""
        info = self.tensors[name]
        data = np.empty(info.nbytes, dtype=np.uint8)
        self.read_into(info, data)
        return data

    def shard_path(self, shard: str) -> Path:
        """Return the path of a shard."""
        return self.path / shard

    def sidecars(self) -> tuple[str, ...]:
        """Return the files to copy to a quantized model unchanged: tokenizer, templates, custom code, licence.

        Raises:
            UnsafeFileError: If the link of a file leads out of the folder, or a file is not a regular file.
            StorageError: If the operating system refuses to list a folder.
        """
        entries = list_folder(self.path)
        names = [name for name in entries if is_sidecar(name)]
        modules = [f"{name}/{CONFIG_FILE}" for name in entries if is_module_folder(name)]
        names += [name for name in modules if os.path.lexists(self.path / name)]
        folder = self.path / SIDECAR_FOLDER
        if folder.is_dir():
            names += [f"{SIDECAR_FOLDER}/{name}" for name in list_folder(folder) if not name.startswith(".")]
        for name in names:
            if not resolve_inside(self.path, name).is_file():
                raise UnsafeFileError(self.path / name, "not a regular file")
        return tuple(sorted(names))

    def read_file(self, name: str) -> bytes:
        """Return the content of one of `sidecars()`; UnsafeFileError if it is irregular or exceeds 1 GiB."""
        try:
            return read_small(self.path, name, _SIDECAR_LIMIT, UnsafeFileError)
        except FileNotFoundError:
            raise StorageError(f"{self.path / name}: the file is gone; run the same command again") from None

    def _descriptor(self, shard: str) -> int:
        """Return the open file of a shard, after checking that it is the file whose header was read."""
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.path}: the checkpoint is closed")
            if shard not in self._descriptors:
                path = self.shard_path(shard)
                if self._stamps[shard] is None:
                    raise StorageError(f"{path}: only its header was read; download the model to read its weights")
                with storage_errors(path, "open it"):
                    descriptor, status = open_regular(path)
                if (status.st_size, status.st_mtime_ns) != self._stamps[shard]:
                    os.close(descriptor)
                    raise StorageError(f"{path}: the file changed since it was opened; run the same command again")
                self._descriptors[shard] = descriptor
            return self._descriptors[shard]


def _read_ahead(descriptor: int, offset: int, nbytes: int) -> None:
    """Have the operating system read what follows a range while the caller works on the range."""
    # the system's own heuristic fails where threads read different tensors through one descriptor
    if nbytes and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # a file system may not know the hint
            os.posix_fadvise(descriptor, offset + READ_AHEAD_BYTES, nbytes, os.POSIX_FADV_WILLNEED)


def read_config(root: Path) -> dict[str, Any]:
    """Return the content of config.json, whose fields are checked."""
    try:
        data = read_small(root, CONFIG_FILE, _CONFIG_LIMIT, ConfigError)
    except FileNotFoundError:
        hint = "give the folder that holds it"
        if (root / "snapshots").is_dir():
            hint = "this is a folder of the hub cache: give one of its snapshots/REVISION"
        elif gguf := sorted(filter(is_gguf, list_folder(root))):
            raise NotACheckpointError(root / gguf[0], GGUF_HINT) from None
        raise NotACheckpointError(root, f"no {CONFIG_FILE}; {hint}") from None
    config = parse_object(data, root / CONFIG_FILE, ConfigError)
    check_config(config, root / CONFIG_FILE)
    return config


def _quantization_config(root: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the quantization config, searched in the places where servers search it; None if there is none."""
    text_config = config.get("text_config")
    for place in (config, text_config if isinstance(text_config, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            value = place.get(key)
            if value is not None:
                check_quantization(value, root / CONFIG_FILE)
                return dict(value)
    try:
        data = read_small(root, HF_QUANT_CONFIG_FILE, _CONFIG_LIMIT, ConfigError)
    except FileNotFoundError:
        return None
    config_of_modelopt = parse_object(data, root / HF_QUANT_CONFIG_FILE, ConfigError)
    check_quantization(config_of_modelopt, root / HF_QUANT_CONFIG_FILE)
    return config_of_modelopt


def _read_shard(root: Path, name: str) -> _Shard:
    """Return the checked header of one shard and the stamp of its file."""
    path = resolve_inside(root, name)
    try:
        header, status = read_header(path)
    except FileNotFoundError:
        raise ShardIndexError(path, "the link points to a file that is missing; download it again") from None
    return _Shard(header, (status.st_size, status.st_mtime_ns))
