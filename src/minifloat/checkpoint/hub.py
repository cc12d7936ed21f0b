"""Download into the hub's cache of the files of a model that are used, no pickle files or code; or of headers alone.

The list of files is fetched first, so that a model without safetensors is refused before the download. The index
selects the shards, because repositories often hold the same weights in other formats too.
"""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
import sys
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.files import list_folder, resolve_folder
from minifloat.checkpoint.header import ShardHeader, check_header, read_header, read_index, shard_names
from minifloat.checkpoint.hub import Origin, hub_errors, hub_id
from minifloat.checkpoint.layout import CONFIG_FILE, HF_QUANT_CONFIG_FILE, INDEX_FILE, SIDECAR_FOLDER, SINGLE_FILE
from minifloat.errors import HubError

#: Number of bytes of the first request for a shard: most headers are shorter.
_FIRST_BYTES = 1 << 16
_REQUESTS_IN_FLIGHT = 8
_OK = 200  #: status of a server that ignores the range and sends the whole file


@dataclass(frozen=True)
class ModelFiles:
    """Names of the files of a model, and a folder that holds its config."""

    root: Path
    names: tuple[str, ...]
    remote: HubModel | None = None  #: whose shards are not in the folder

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


_LOG = logging.getLogger(__name__)

#: Name patterns of the files to download beside the weights. Case does not matter. Code is not downloaded.
_SMALL_FILES = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "readme.md",
    "license*",
    "notice*",
    "use_policy*",
)


@dataclass(frozen=True)
class HubModel:
    """The current files of a model of the hub, or its copy in the cache if the hub does not answer."""

    origin: Origin
    sizes: Mapping[str, int] | None  #: None if the hub did not answer

    @classmethod
    def of(cls, origin: Origin) -> HubModel:
        from huggingface_hub import HfApi, constants, errors

        api = HfApi(library_name="minifloat")
        with hub_errors(origin):
            try:
                info = api.model_info(
                    origin.repo_id,
                    revision=origin.revision,
                    files_metadata=True,
                    timeout=constants.HF_HUB_ETAG_TIMEOUT,
                )
            except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
                raise
            except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
                unreachable = cls(origin, None)
                try:
                    unreachable.fetch([CONFIG_FILE])
                except errors.LocalEntryNotFoundError:
                    raise error from None
                if not isinstance(error, errors.OfflineModeIsEnabled):
                    _LOG.warning("%s: the hub does not answer; the copy in its cache is used", origin)
                return unreachable
        return cls(origin, {file.rfilename: file.size or 0 for file in info.siblings or ()})

    @property
    def names(self) -> list[str] | None:
        """Sorted names of the files at the top level; None if the hub did not answer."""
        return None if self.sizes is None else sorted(name for name in self.sizes if "/" not in name)

    def fetch(self, names: Collection[str], *, show: bool = False) -> Path:
        """Download files into the cache, except those that it already holds."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm

        class Quiet(tqdm):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]

        return Path(
            snapshot_download(
                self.origin.repo_id,
                revision=self.origin.revision,
                allow_patterns=[glob.escape(name) for name in names],
                local_files_only=self.sizes is None,
                library_name="minifloat",
                tqdm_class=tqdm if show and sys.stderr.isatty() else Quiet,
            )
        )


def model_folder(model: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """Return the folder of a model; download a model of the hub into the hub's cache first."""
    origin = hub_id(model, revision)
    if origin is None:
        return Path(model)
    remote = HubModel.of(origin)
    if remote.names is not None and INDEX_FILE not in remote.names:
        shard_names(Path(origin.repo_id), remote.names, None)  # refuses a model that has pickle files only
    with hub_errors(origin):
        small = _small_files(remote.sizes or ())
        root = remote.fetch(small or [CONFIG_FILE])
        weight_map = read_index(root)
        if remote.names is None:  # without the list of files, the index in the cache names the shards
            return remote.fetch([CONFIG_FILE, *({SINGLE_FILE} if weight_map is None else set(weight_map.values()))])
        return remote.fetch([*small, *shard_names(root, remote.names, weight_map)], show=True)


def _small_files(names: Collection[str]) -> list[str]:
    """Return the names of config, index, tokenizer, templates, model card and licence."""
    return [
        name
        for name in names
        if Path(name).parent.name in ("", SIDECAR_FOLDER)
        and any(fnmatch.fnmatchcase(Path(name).name.lower(), pattern) for pattern in _SMALL_FILES)
    ]
