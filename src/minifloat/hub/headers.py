"""The headers of a model's shards, wherever these lie: from a folder, or from the hub without its weights.

A header is a few kilobytes at the start of a file of gigabytes, and HTTP can ask for a part of a file. What comes is
checked as the header of a local file is; the size that it is checked against is that of the hub's list.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from minifloat.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint
from minifloat.checkpoint.files import list_folder, resolve_folder
from minifloat.checkpoint.header import ShardHeader, check_header, read_header
from minifloat.checkpoint.index import read_index
from minifloat.checkpoint.layout import HF_QUANT_CONFIG_FILE
from minifloat.checkpoint.reader import shard_names
from minifloat.errors import HubError
from minifloat.hub.errors import hub_errors
from minifloat.hub.fetch import HubModel
from minifloat.hub.ids import hub_id

#: Bytes that the first request of a shard asks for: most headers are shorter.
_FIRST_BYTES = 1 << 16
_REQUESTS_IN_FLIGHT = 8
_OK = 200  #: the answer of a server that sends whole files only


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model by name, and a folder with its config.

    Attributes:
        root: The folder, links resolved; of a model of the hub, a snapshot in the hub's cache.
        names: All files at the model's top level.
        remote: Where the shards are, if they are not in the folder.
    """

    root: Path
    names: tuple[str, ...]
    remote: HubModel | None = None

    def open(self) -> Checkpoint:
        """Read and check config, index and headers; no weight is read.

        Raises:
            CheckpointError: The files are not what they claim to be.
            HubError: The hub refuses, or cannot be reached.
            StorageError: The system refuses a read.
        """
        remote = self.remote
        if remote is None:
            return Checkpoint.open(self.root)
        shards = shard_names(self.root, self.names, read_index(self.root))
        with hub_errors(remote.origin), ThreadPoolExecutor(_REQUESTS_IN_FLIGHT) as pool:
            headers = dict(zip(shards, pool.map(lambda shard: self._header(remote, shard), shards), strict=True))
        return Checkpoint.open_headers(self.root, self.names, headers.__getitem__)

    def _header(self, remote: HubModel, shard: str) -> ShardHeader:
        path = self.root / shard
        if path.exists():  # it is in the cache
            return read_header(path)[0]
        assert remote.sizes is not None
        file = _RemoteFile(remote, shard, commit=self.root.name, nbytes=remote.sizes[shard])
        return check_header(file.read, path=path, file_bytes=file.nbytes)


def list_model_files(model: str | os.PathLike[str], *, revision: str | None = None) -> ModelFiles:
    """What files a model has; of a model of the hub, its config is brought into the cache and nothing else.

    Args:
        model: As in `model_folder`.
        revision: As in `model_folder`.

    Raises:
        NotACheckpointError: A folder that does not exist.
        UsageError: A revision of a folder, or two of an id.
        HubError: The hub has no such model, refuses it, or cannot be reached and the cache does not have it.
        StorageError: The system refuses.
    """
    origin = hub_id(model, revision)
    if origin is None:
        root = resolve_folder(model)
        return ModelFiles(root, tuple(list_folder(root)))
    found = HubModel.of(origin)
    configs = [CONFIG_FILE, INDEX_FILE, HF_QUANT_CONFIG_FILE]
    with hub_errors(origin):
        root = found.fetch(configs if found.names is None else [name for name in configs if name in found.names])
    root = root.resolve()
    if found.names is None:
        return ModelFiles(root, tuple(list_folder(root)))
    return ModelFiles(root, tuple(found.names), found)


def open_headers(model: str | os.PathLike[str], *, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint for everything but its weights; those of a model of the hub stay there.

    Args:
        model: As in `model_folder`.
        revision: As in `model_folder`.

    Raises:
        CheckpointError: The files are not what they claim to be.
        UsageError: A revision of a folder, or two of an id.
        HubError: The hub has no such model, refuses it, or cannot be reached and the cache does not have it.
        StorageError: The system refuses.
    """
    return list_model_files(model, revision=revision).open()


class _RemoteFile:
    """The start of a file of the hub."""

    def __init__(self, model: HubModel, name: str, *, commit: str, nbytes: int) -> None:
        from huggingface_hub import hf_hub_url

        self.nbytes = nbytes
        self._model, self._name = model, name
        self._url = hf_hub_url(model.origin.repo_id, name, revision=commit)
        self._start = b""

    def read(self, start: int, count: int) -> bytes:
        """So many bytes, from `start` on: one request for short headers, another for the rest of a longer one."""
        if not self._start:
            self._start = self._fetch(0, min(_FIRST_BYTES, self.nbytes))
        if start + count > len(self._start):
            self._start += self._fetch(len(self._start), start + count - len(self._start))
        return self._start[start : start + count]

    def _fetch(self, start: int, count: int) -> bytes:
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        headers = build_hf_headers(library_name="minifloat")
        headers |= {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        data = bytearray()
        with http_stream_backoff("GET", self._url, headers=headers, timeout=timeout) as response:
            hf_raise_for_status(response)
            skipped = start if response.status_code == _OK else 0
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) >= skipped + count:
                    break
        if len(data) < skipped + count:
            raise HubError(str(self._model.origin), f"{self._name} ended early: run the same command again")
        return bytes(data[skipped : skipped + count])
