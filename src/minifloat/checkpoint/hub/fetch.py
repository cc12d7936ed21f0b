"""Download of the files of a model that are used, and no pickle files or code, into the hub's cache.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minifloat.checkpoint.header import read_index, shard_names
from minifloat.checkpoint.hub.errors import hub_errors
from minifloat.checkpoint.hub.ids import Origin, hub_id
from minifloat.checkpoint.layout import CONFIG_FILE, INDEX_FILE, SIDECAR_FOLDER, SINGLE_FILE

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
    """The current files of a model of the hub, or its copy in the cache if the hub does not answer.

    Attributes:
        sizes: Sizes of its files in bytes, by name; None if the hub did not answer.
    """

    origin: Origin
    sizes: Mapping[str, int] | None

    @classmethod
    def of(cls, origin: Origin) -> HubModel:
        """Request the list of files from the hub."""
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
