"""The headers of a model's shards, from a local folder or from the hub without downloading the weights.

A header is a few kilobytes at the start of a file of gigabytes, and an HTTP range request fetches only these bytes. A
remote header is checked like a local one, against the file size in the hub's list of files.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from minifloat.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint
from minifloat.checkpoint.files import list_folder, resolve_folder
from minifloat.checkpoint.header import ShardHeader, check_header, read_header, read_index, shard_names
from minifloat.checkpoint.hub.errors import hub_errors
from minifloat.checkpoint.hub.fetch import HubModel
from minifloat.checkpoint.hub.ids import hub_id
from minifloat.checkpoint.layout import HF_QUANT_CONFIG_FILE
from minifloat.errors import HubError

#: Number of bytes of the first request for a shard: most headers are shorter.
_FIRST_BYTES = 1 << 16
_REQUESTS_IN_FLIGHT = 8
_OK = 200  #: status of a server that ignores the range and sends the whole file


@dataclass(frozen=True)
class ModelFiles:
    """Names of the files of a model, and a folder that holds its config.

    Attributes:
        remote: The model of the hub whose shards are not in the folder; None for a local folder.
    """

    root: Path
    names: tuple[str, ...]
    remote: HubModel | None = None

    def open(self) -> Checkpoint:
        """Read and check config, index and headers, but no weights."""
        remote = self.remote
        if remote is None:
            return Checkpoint.open(self.root)
        shards = shard_names(self.root, self.names, read_index(self.root))
        with hub_errors(remote.origin), ThreadPoolExecutor(_REQUESTS_IN_FLIGHT) as pool:
            headers = dict(zip(shards, pool.map(lambda shard: self._header(remote, shard), shards), strict=True))
        return Checkpoint.open_headers(self.root, self.names, headers.__getitem__)

    def _header(self, remote: HubModel, shard: str) -> ShardHeader:
        path = self.root / shard
        if path.exists():  # already in the cache
            return read_header(path)[0]
        assert remote.sizes is not None
        file = _RemoteFile(remote, shard, commit=self.root.name, nbytes=remote.sizes[shard])
        return check_header(file.read, path=path, file_bytes=file.nbytes)


def list_model_files(model: str | os.PathLike[str], *, revision: str | None = None) -> ModelFiles:
    """Return the names of the files of a model; of a model of the hub, download only config and index."""
    origin = hub_id(model, revision)
    if origin is None:
        root = resolve_folder(model)
        return ModelFiles(root, tuple(list_folder(root)))
    remote = HubModel.of(origin)
    configs = [CONFIG_FILE, INDEX_FILE, HF_QUANT_CONFIG_FILE]
    with hub_errors(origin):
        root = remote.fetch(configs if remote.names is None else [name for name in configs if name in remote.names])
    root = root.resolve()
    if remote.names is None:
        return ModelFiles(root, tuple(list_folder(root)))
    return ModelFiles(root, tuple(remote.names), remote)


def open_headers(model: str | os.PathLike[str], *, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint by its config, index and headers, without downloading the weights of a model of the hub."""
    return list_model_files(model, revision=revision).open()


class _RemoteFile:
    """Reads the first bytes of a file on the hub."""

    def __init__(self, model: HubModel, name: str, *, commit: str, nbytes: int) -> None:
        from huggingface_hub import hf_hub_url

        self.nbytes = nbytes
        self._model, self._name = model, name
        self._url = hf_hub_url(model.origin.repo_id, name, revision=commit)
        self._start = b""

    def read(self, start: int, count: int) -> bytes:
        """Return `count` bytes from `start` on, with one request for a short header and two for a long one."""
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
