"""A model's files, from the hub into its cache: those that are used, and no pickle or code.

The list of files comes first, and what can be refused by their names is refused then. The index says which shards are
the model: repositories hold the same weights in other forms too.
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

from minifloat.checkpoint.index import read_index
from minifloat.checkpoint.layout import CONFIG_FILE, INDEX_FILE, SIDECAR_FOLDER, SINGLE_FILE
from minifloat.checkpoint.reader import shard_names
from minifloat.hub.errors import hub_errors
from minifloat.hub.ids import Origin, hub_id

_LOG = logging.getLogger(__name__)

#: Files beside the weights, matched without regard to case; no code.
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
    """A model of the hub, as it is now or, where the hub does not answer, as the cache has it.

    Attributes:
        origin: What was asked for.
        sizes: Its files, with their bytes; None where the hub did not answer.
    """

    origin: Origin
    sizes: Mapping[str, int] | None

    @classmethod
    def of(cls, origin: Origin) -> HubModel:
        """Ask the hub for the list of files.

        Raises:
            HubError: There is no such model or revision, or it may not be read.
        """
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
        """The files that are not in a folder, sorted."""
        return None if self.sizes is None else sorted(name for name in self.sizes if "/" not in name)

    def fetch(self, names: Collection[str], *, show: bool = False) -> Path:
        """Have files in the cache.

        Args:
            names: Of `sizes`.
            show: Show a progress bar, if somebody sees it.

        Returns:
            The folder of the snapshot.

        Raises:
            Exception: Those of huggingface_hub; see `hub_errors`.
        """
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
    """The folder of a model; a model of the hub is brought into the hub's cache first.

    Args:
        model: A folder, or the id of a model of the hub, ``ORG/NAME`` or ``ORG/NAME@REVISION``. A folder that exists
            wins, and a `Path` is always one.
        revision: Branch, tag or commit of a model of the hub; by default its default branch.

    Returns:
        The folder; of the hub's cache, one snapshot. A folder that was given is not looked into.

    Raises:
        UsageError: A revision of a folder, or two of an id.
        HubError: The hub has no such model, refuses it, or cannot be reached and the cache does not have it.
        CheckpointError: It has no weights in safetensors; then none of its files was fetched.
        StorageError: The disk is full, or the system refuses.
    """
    origin = hub_id(model, revision)
    if origin is None:
        return Path(model)
    found = HubModel.of(origin)
    if found.names is not None and INDEX_FILE not in found.names:
        shard_names(Path(origin.repo_id), found.names, None)  # refuses what has pickle files only
    with hub_errors(origin):
        small = _small_files(found.sizes or ())
        root = found.fetch(small or [CONFIG_FILE])
        weight_map = read_index(root)
        if found.names is None:  # what the model has is not known, but what the index says
            return found.fetch([CONFIG_FILE, *({SINGLE_FILE} if weight_map is None else set(weight_map.values()))])
        return found.fetch([*small, *shard_names(root, found.names, weight_map)], show=True)


def _small_files(names: Collection[str]) -> list[str]:
    """Config, index, tokenizer, templates, card and licence."""
    return [
        name
        for name in names
        if Path(name).parent.name in ("", SIDECAR_FOLDER)
        and any(fnmatch.fnmatchcase(Path(name).name.lower(), pattern) for pattern in _SMALL_FILES)
    ]
