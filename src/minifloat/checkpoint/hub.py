"""Models of the Hugging Face hub, whose ids are accepted wherever a model folder is.

Only the files in use are downloaded into the hub's cache, no pickle files or code; or headers alone by range requests.
The name of an existing folder and every `Path` is a folder; other texts are ids: ``[ORG/]NAME[@REVISION]``.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.files import list_folder, resolve_folder, storage_errors
from minifloat.checkpoint.header import ShardHeader, check_header, read_header, read_index, shard_names
from minifloat.checkpoint.layout import (
    CONFIG_FILE,
    HF_QUANT_CONFIG_FILE,
    INDEX_FILE,
    SIDECAR_FOLDER,
    SINGLE_FILE,
    is_module_folder,
)
from minifloat.errors import HubError, UsageError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError


LOGIN = "set HF_TOKEN or run `hf auth login`"
_UNAUTHORIZED, _FORBIDDEN, _TOO_MANY = 401, 403, 429


@contextlib.contextmanager
def hub_errors(model: Origin, *, looked_up: bool = True) -> Iterator[None]:
    """Convert exceptions of huggingface_hub in the block to HubError, and errors of the disk to StorageError."""
    from huggingface_hub import constants, errors

    name, address = str(model), f"{constants.ENDPOINT}/{model.repo_id}"
    no_folder = "no such folder, and " if looked_up else ""
    cache = constants.HF_HUB_CACHE
    try:
        yield
    except errors.GatedRepoError:
        raise HubError(name, f"access is restricted: accept its conditions at {address}, then {LOGIN}") from None
    except errors.RepositoryNotFoundError:
        raise HubError(name, f"{no_folder}no such model at {constants.ENDPOINT}; if it is private, {LOGIN}") from None
    except errors.RevisionNotFoundError:
        revision = model.revision or constants.DEFAULT_REVISION
        raise HubError(
            model.repo_id, f"no revision {revision!r}; {address}/tree/main lists branches and tags"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        cure = "the hub did not answer: run the same command again"
        if constants.HF_HUB_OFFLINE:
            cure = f"HF_HUB_OFFLINE is set: unset it, or run `hf download {model.repo_id}` where there is a network"
        raise HubError(name, f"{no_folder}the cache {cache} does not hold all of its files; {cure}") from None
    except errors.HfHubHTTPError as error:
        raise HubError(name, _refusal(error)) from error
    except errors.HTTPError as error:  # from the HTTP client
        raise HubError(
            name,
            f"{no_folder}{constants.ENDPOINT} cannot be reached: {first_line(error)}; check the network and "
            "HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to use what is in the cache",
        ) from error
    except OSError as error:
        if error.errno is None:
            raise HubError(name, first_line(error)) from error
        with storage_errors(Path(cache), "use the cache of the hub"):
            raise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without a final dot."""
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _refusal(error: HfHubHTTPError) -> str:
    """Return a message with the cure for a refused HTTP request."""
    status = error.response.status_code
    reason = error.server_message or first_line(error)
    if status == _UNAUTHORIZED:
        return f"the hub does not accept the token ({reason}); {LOGIN}"
    if status == _FORBIDDEN:
        return f"the hub forbids the request ({reason}); use a token with the permission for it"
    if status == _TOO_MANY:
        return f"the hub has received too many requests ({reason}); wait a while, or {LOGIN}"
    return f"the hub answers with status {status} ({reason})"


_SNAPSHOTS, _PREFIX, _SLASH = "snapshots", "models--", "--"


class Origin(NamedTuple):
    """A model of the hub."""

    repo_id: str
    revision: str | None

    def __str__(self) -> str:
        """Return ``REPO_ID`` or ``REPO_ID@REVISION``, which `hub_id` reads."""
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"


def hub_id(model: str | os.PathLike[str], revision: str | None = None) -> Origin | None:
    """Return the model of the hub that `model` names, or None if it names a folder."""
    origin = None if isinstance(model, os.PathLike) or os.path.lexists(model) else _parse(model)
    if origin is None:
        if revision is not None:
            raise UsageError(f"revision {revision!r}: models of the hub have revisions; {model} is a folder")
        return None
    if revision is None:
        return origin
    if origin.revision not in (None, revision):
        raise UsageError(f"{model}: two revisions, {origin.revision!r} and {revision!r}; give one")
    return Origin(origin.repo_id, revision)


def is_hub_id(text: str) -> bool:
    """Return whether the hub allows `text` as the id of a model, without a revision."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def _parse(text: str) -> Origin | None:
    repo_id, at, revision = text.partition("@")
    if (at and not revision) or not is_hub_id(repo_id):
        return None
    return Origin(repo_id, revision or None)


def origin_of(folder: Path) -> Origin | None:
    """Return the model and commit of a snapshot folder in the hub's cache; None for any other folder."""
    cached = folder.parent.parent.name
    if folder.parent.name != _SNAPSHOTS or not cached.startswith(_PREFIX):
        return None
    return Origin(cached.removeprefix(_PREFIX).replace(_SLASH, "/"), folder.name)


def model_name(model: str | os.PathLike[str]) -> str:
    """Return the display name of a model: its id on the hub or in the hub's cache, else the name of its folder."""
    folder = Path(model).resolve()
    origin = hub_id(model) or origin_of(folder)
    return folder.name if origin is None else origin.repo_id


def name_of(checkpoint: Checkpoint) -> str:
    """Return the display name of the model of a checkpoint."""
    return checkpoint.name or model_name(checkpoint.path)


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
        if (Path(name).parent.name in ("", SIDECAR_FOLDER) or is_module_folder(Path(name).parent.name))
        and any(fnmatch.fnmatchcase(Path(name).name.lower(), pattern) for pattern in _SMALL_FILES)
    ]
