"""A model folder, opened without believing it.

`Checkpoint.open` reads config.json, the shard index and the header of every shard, and no tensor: it costs
milliseconds whatever the model's size. Everything is checked before the first tensor is used, so that an hour of work
does not end at a broken last shard. Tensors are then read by position, from any thread, into the caller's memory.

`Checkpoint.open_headers` is the same where the weights themselves are elsewhere, on the hub: everything but `read`.

Left out: memory maps (a file that shrinks under a map kills the process, a failed `pread` is an error) and pickle
files, which run code when they are loaded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
from minifloat.checkpoint.header import ShardHeader, read_header
from minifloat.checkpoint.index import check_index, read_index
from minifloat.checkpoint.layout import (
    CONFIG_FILE,
    HF_QUANT_CONFIG_FILE,
    INDEX_FILE,
    SHARD_SUFFIX,
    SIDECAR_FOLDER,
    SINGLE_FILE,
    STATE_FILE,
    is_pickle,
    is_sidecar,
    is_weights,
)
from minifloat.checkpoint.tensors import TensorInfo
from minifloat.errors import ConfigError, NotACheckpointError, ShardIndexError, StorageError, UnsafeFileError

_CONFIG_LIMIT = 16 * 2**20
_SIDECAR_LIMIT = 2**30


class _Shard(NamedTuple):
    """A shard as it was when its header was read; `stamp` is its size and time of change, None where it is not here."""

    header: ShardHeader
    stamp: tuple[int, int] | None


class Checkpoint:
    """A validated folder of safetensors and its config. A context manager; made by `Checkpoint.open`.

    Attributes:
        path: The folder, links resolved.
        config: The content of config.json.
        quantization_config: How the weights are quantized already, from config.json or from ModelOpt's own file; None
            for a plain model.
        tensors: By name, ordered by shard, then by offset.
        shards: File names of the shards, sorted.
        metadata: The free-form strings in the header of each shard.
        ignored_files: Files of weights that the model does not use.
    """

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
        """Read and check everything but the tensors.

        Raises:
            CheckpointError: The folder is not a model, or a file in it is not what it claims to be.
            StorageError: The system refuses a read.
        """
        root = resolve_folder(path)
        with storage_errors(root, "look into the folder"):
            unfinished = (root / STATE_FILE).exists() or (root.parent / STATE_FILE).exists()
        if unfinished:
            raise NotACheckpointError(
                root, "interrupted minifloat output; run the same command again to finish it, or delete the folder"
            )
        return cls.open_unfinished(root)

    @classmethod
    def open_unfinished(cls, root: Path) -> Checkpoint:
        """`open` without asking whether the folder is finished: how a writer checks its output before it renames it.

        Args:
            root: An existing folder, links resolved.
        """
        return cls._open(root, sorted(list_folder(root)), lambda name: _read_shard(root, name))

    @classmethod
    def open_headers(cls, root: Path, names: Collection[str], read: Callable[[str], ShardHeader]) -> Checkpoint:
        """Read and check the same of a model whose shards are elsewhere; reading a tensor of it is an error.

        Args:
            root: An existing folder with config.json and, where there is one, the index; links resolved.
            names: All files of the model, as if they lay in the folder.
            read: Gives the header of a shard.

        Raises:
            CheckpointError: As `open`, and what `read` raises.
        """
        return cls._open(root, sorted(names), lambda name: _Shard(read(name), None))

    @classmethod
    def _open(cls, root: Path, names: list[str], read: Callable[[str], _Shard]) -> Checkpoint:
        config = _read_config(root)
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
        """Close the files. No thread may be reading; reading afterwards is an error."""
        with self._lock:
            self._closed = True
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def read_into(self, info: TensorInfo, buffer: memoryview | npt.NDArray[np.uint8], start: int = 0) -> None:
        """Fill `buffer` with the bytes of a tensor from byte `start` on. Any number of threads may call it.

        Args:
            info: One of `tensors`.
            buffer: Writable and contiguous; its size says how much is read.
            start: First byte, counted from the start of the tensor.

        Raises:
            ValueError: The range leaves the tensor, or the checkpoint is closed.
            StorageError: The system refuses, or the file is no longer the one that was opened.
        """
        view = byte_view(buffer)
        if start < 0 or start + len(view) > info.nbytes:
            raise ValueError(f"{info.name}: bytes {start} to {start + len(view)} of a tensor of {info.nbytes}")
        read_exactly(self._descriptor(info.shard), view, info.offset + start, self.shard_path(info.shard))

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """All bytes of a tensor, uint8 `[nbytes]`."""
        info = self.tensors[name]
        data = np.empty(info.nbytes, dtype=np.uint8)
        self.read_into(info, data)
        return data

    def shard_path(self, shard: str) -> Path:
        """The path of a shard."""
        return self.path / shard

    def sidecars(self) -> tuple[str, ...]:
        """Files to carry over to a quantized model unchanged: tokenizer, templates, custom code, licence.

        The rule is `layout.SIDECAR_PATTERNS`. Names in a subfolder have a `/`. Ask before the work begins: a file that
        will be refused is refused here.

        Raises:
            UnsafeFileError: One of them leaves the folder, or is not a regular file.
            StorageError: The system refuses to list a folder.
        """
        names = [name for name in list_folder(self.path) if is_sidecar(name)]
        folder = self.path / SIDECAR_FOLDER
        if folder.is_dir():
            names += [f"{SIDECAR_FOLDER}/{name}" for name in list_folder(folder) if not name.startswith(".")]
        for name in names:
            if not resolve_inside(self.path, name).is_file():
                raise UnsafeFileError(self.path / name, "not a regular file")
        return tuple(sorted(names))

    def read_file(self, name: str) -> bytes:
        """A whole sidecar.

        Args:
            name: One of `sidecars()`.

        Raises:
            UnsafeFileError: It leaves the folder, is not a regular file, or is incredibly large.
            StorageError: The system refuses, or the file is gone.
        """
        try:
            return read_small(self.path, name, _SIDECAR_LIMIT, UnsafeFileError)
        except FileNotFoundError:
            raise StorageError(f"{self.path / name}: the file is gone; run the same command again") from None

    def _descriptor(self, shard: str) -> int:
        """The open file of a shard, which must be the one whose header was read."""
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


def _read_config(root: Path) -> dict[str, Any]:
    try:
        data = read_small(root, CONFIG_FILE, _CONFIG_LIMIT, ConfigError)
    except FileNotFoundError:
        hint = "give the folder that holds it"
        if (root / "snapshots").is_dir():
            hint = "this is a folder of the hub cache: give one of its snapshots/REVISION"
        raise NotACheckpointError(root, f"no {CONFIG_FILE}; {hint}") from None
    return parse_object(data, root / CONFIG_FILE, ConfigError)


def _quantization_config(root: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """What says that the weights are quantized already, looked for where servers look for it."""
    text_config = config.get("text_config")
    for place in (config, text_config if isinstance(text_config, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            found = place.get(key)
            if isinstance(found, dict):
                return found
            if found is not None:
                raise ConfigError(root / CONFIG_FILE, f"{key}: expected a JSON object, found {type(found).__name__}")
    try:
        data = read_small(root, HF_QUANT_CONFIG_FILE, _CONFIG_LIMIT, ConfigError)
    except FileNotFoundError:
        return None
    return parse_object(data, root / HF_QUANT_CONFIG_FILE, ConfigError)


def shard_names(root: Path, names: Collection[str], weight_map: Mapping[str, str] | None) -> list[str]:
    """The shards of a model, sorted.

    Args:
        root: Its folder, for messages.
        names: All files in it.
        weight_map: Of `read_index`.

    Raises:
        ShardIndexError: Shards are missing, or which files are the model is not clear.
        UnsafeFileError: There are pickle files only.
        NotACheckpointError: There are no weights.
    """
    present = sorted(name for name in names if name.endswith(SHARD_SUFFIX))
    if weight_map is not None:
        claimed = sorted(set(weight_map.values()))
        missing = [shard for shard in claimed if shard not in names]
        if missing:
            raise ShardIndexError(
                root / INDEX_FILE,
                f"{len(missing)} of {len(claimed)} shards are missing, the first is {missing[0]!r}; download it again",
            )
        if SINGLE_FILE in present and SINGLE_FILE not in claimed:
            raise ShardIndexError(
                root / INDEX_FILE,
                f"two models in one folder: {SINGLE_FILE}, which transformers loads, and the shards of this index; "
                "move one of them away",
            )
        return claimed
    if SINGLE_FILE in present:
        return [SINGLE_FILE]  # what every loader takes; other files are adapters, originals of the same model, ...
    if len(present) > 1:
        raise ShardIndexError(
            root, f"{len(present)} {SHARD_SUFFIX} files but no {INDEX_FILE}: which of them are the model is unknown"
        )
    if present:
        return present
    pickles = sorted(filter(is_pickle, names))
    if pickles:
        raise UnsafeFileError(
            root / pickles[0],
            "a pickle file can run code and is not read; convert the model first, if you trust it: "
            "transformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW) writes safetensors",
        )
    raise NotACheckpointError(root, f"no {SHARD_SUFFIX} file")


def _read_shard(root: Path, name: str) -> _Shard:
    """The checked header of one shard."""
    path = resolve_inside(root, name)
    try:
        header, status = read_header(path)
    except FileNotFoundError:
        raise ShardIndexError(path, "the link points to a file that is missing; download it again") from None
    return _Shard(header, (status.st_size, status.st_mtime_ns))
