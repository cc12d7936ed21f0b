"""`push`: a checkpoint goes to the hub, and nothing else that lies in its folder.

It is opened and checked first, and its card is held to what publishers are asked for: what it was made from, and under
which licence. Files are chosen by what they are for, not by what they are not: what nobody named stays here.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from minifloat.check.deployment import BEGIN, check_everywhere, deployment_section
from minifloat.check.subject import Subject
from minifloat.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint
from minifloat.checkpoint.files import list_folder, resolve_inside, storage_errors
from minifloat.checkpoint.layout import HF_QUANT_CONFIG_FILE
from minifloat.checkpoint.rewrite import CARD_FILE, REPORT_FILE
from minifloat.errors import CheckpointError, HubError, UnsafeFileError, UsageError
from minifloat.hub.errors import first_line, hub_errors
from minifloat.hub.ids import Origin, is_hub_id
from minifloat.layouts import describe
from minifloat.report.card import add_metadata, read_card, read_metadata, with_section, write_card

#: Beside the shards and the sidecars.
_NAMED = (CONFIG_FILE, INDEX_FILE, HF_QUANT_CONFIG_FILE, REPORT_FILE, CARD_FILE)
_OPTIONS = {"license": "--license NAME (apache-2.0, mit, other, ...)", "base_model": "--base-model ORG/NAME"}


@dataclass(frozen=True)
class PushReport:
    """What was uploaded, or would be.

    Attributes:
        repo_id: Where to.
        files: By name, with their bytes.
        left: Files and folders that stay here.
        notes: What a user should know, in sentences.
        url: Of the commit or the pull request; None for a dry run.
    """

    repo_id: str
    files: dict[str, int]
    left: tuple[str, ...]
    notes: tuple[str, ...]
    url: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"left": list(self.left), "notes": list(self.notes), "nbytes": self.nbytes}


def push_checkpoint(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    create_pr: bool = False,
    base_model: str | None = None,
    license: str | None = None,  # the key's name
    dry_run: bool = False,
) -> PushReport:
    """Upload a checkpoint to the hub, in a repository that is made where there is none.

    The card in the folder is completed first: the given metadata, and the repository's id in its commands.

    Args:
        folder: A checkpoint.
        repo_id: ``ORG/NAME``.
        private: Make a new repository private; an existing one must be.
        revision: The branch to commit to, made where there is none; by default the default branch.
        message: Of the commit.
        create_pr: Open a pull request instead of committing.
        base_model: For the card, if it has none.
        license: For the card, if it has none: an identifier of the hub, or ``other``.
        dry_run: Write and send nothing.

    Raises:
        UsageError: The request is wrong, or the card lacks something and nothing was given for it.
        CheckpointError: The folder is not what it claims to be, or has no card.
        HubError: The hub refuses, or cannot be reached.
        StorageError: The system refuses.
    """
    if not is_hub_id(repo_id):
        raise UsageError(f"expected the id of a model of the hub, ORG/NAME, got {repo_id!r}")
    if create_pr and revision is not None:
        raise UsageError("a pull request is opened against the default branch; leave out the revision")
    with Checkpoint.open(folder) as checkpoint:
        quantized = describe(checkpoint).layout is not None
        given = {"license": license, "base_model": base_model}
        card = _completed_card(checkpoint, {key: value for key, value in given.items() if value}, quantized=quantized)
        if BEGIN.encode() in card.content:
            engines = check_everywhere(Subject.of_checkpoint(checkpoint), repo_id)
            card = card.with_section(deployment_section(engines, repo_id))
        files = _files(checkpoint) | {CARD_FILE: len(card.content)}
    uploaded = {name.partition("/")[0] for name in files}
    left = tuple(sorted(name for name in list_folder(checkpoint.path) if name not in uploaded))
    report = PushReport(repo_id, files, left, () if quantized else ("The checkpoint is not quantized.",))
    if dry_run:
        return report
    card.require_models()
    card.write()
    with hub_errors(Origin(repo_id, revision), looked_up=False):
        try:
            url = _upload(checkpoint.path, report, private, revision, message, create_pr)
        except (ValueError, RuntimeError) as error:  # metadata that the hub refuses; an upload that failed for good
            raise HubError(repo_id, f"{first_line(error)}: {first_line(error.__cause__ or error)}") from error
    return replace(report, url=url)


def _files(checkpoint: Checkpoint) -> dict[str, int]:
    """The files that are the checkpoint, with their bytes; each a regular file in the folder.

    Raises:
        UnsafeFileError: One of them leaves the folder, or is not a regular file.
    """
    present = set(list_folder(checkpoint.path))
    names = {*checkpoint.shards, *checkpoint.sidecars(), *(name for name in _NAMED if name in present)}
    files = {}
    for name in sorted(names):
        path = resolve_inside(checkpoint.path, name)
        if not path.is_file():
            raise UnsafeFileError(path, "not a regular file")
        with storage_errors(path, "look at it"):
            files[name] = path.stat().st_size
    return files


@dataclass(frozen=True)
class _Card:
    """A card with its metadata, as it is to be uploaded."""

    folder: Path
    content: bytes
    metadata: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> _Card:
        path = folder / CARD_FILE
        try:
            content = read_card(folder)
            return cls(folder, content, read_metadata(content.decode("utf-8")))
        except FileNotFoundError:
            raise CheckpointError(path, "no model card; write one that says what the model is") from None
        except ValueError as error:  # UnicodeDecodeError among them
            raise CheckpointError(path, f"the metadata in its head cannot be read: {error}") from None

    def with_metadata(self, values: Mapping[str, Any]) -> _Card:
        content = add_metadata(self.content.decode("utf-8"), values) if values else self.content.decode("utf-8")
        return _Card(self.folder, content.encode(), {**self.metadata, **values})

    def with_section(self, section: str) -> _Card:
        return replace(self, content=with_section(self.content, section, self.folder / CARD_FILE))

    @property
    def base_models(self) -> list[str]:
        found = self.metadata.get("base_model") or []
        return [str(base) for base in (found if isinstance(found, list) else [found])]

    def require_models(self) -> None:
        """Raise unless the hub has what the card calls its base."""
        from huggingface_hub import HfApi, errors

        for base in self.base_models:
            with hub_errors(Origin(base, None), looked_up=False):
                try:
                    HfApi(library_name="minifloat").model_info(base)
                except errors.GatedRepoError:
                    continue
                except errors.RepositoryNotFoundError:
                    path = self.folder / CARD_FILE
                    raise HubError(base, f"the hub has no such model, which is base_model in {path}") from None

    def write(self) -> None:
        if self.content != read_card(self.folder):
            write_card(self.folder, self.content)


def _completed_card(checkpoint: Checkpoint, given: Mapping[str, str], *, quantized: bool) -> _Card:
    """The card, with what it lacks and was given.

    Raises:
        CheckpointError: There is no card, or its head cannot be read.
        UsageError: It lacks something still, or says something else than what was given.
    """
    card = _Card.read(checkpoint.path)
    path, found = checkpoint.path / CARD_FILE, card.metadata
    for key, value in given.items():
        if found.get(key) not in (None, [], "", value, [value]):
            raise UsageError(f"{path}: {key} is {found[key]!r} there and {value!r} here; correct the card, or leave it")
    new = {key: value for key, value in given.items() if not found.get(key)}
    if quantized and "base_model" in new:
        new["base_model_relation"] = "quantized"
    card = card.with_metadata(new)
    missing = [key for key in ("license", *(["base_model"] if quantized else [])) if not card.metadata.get(key)]
    if missing:
        cure = " and ".join(_OPTIONS[key] for key in missing)
        raise UsageError(
            f"{path}: the head of the card has no {' and no '.join(missing)}: add it there, or give {cure}"
        )
    for base in card.base_models:
        if not is_hub_id(base):
            raise UsageError(f"{path}: base_model: expected the id of a model of the hub, ORG/NAME, found {base!r}")
    return card


def _upload(
    root: Path, report: PushReport, private: bool, revision: str | None, message: str | None, create_pr: bool
) -> str:
    """Make the repository and commit; the address of what came of it."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="minifloat")
    api.create_repo(report.repo_id, private=private or None, exist_ok=True)
    if private and not api.model_info(report.repo_id).private:
        raise HubError(report.repo_id, "exists and is public; make it private there, or leave out --private")
    if revision is not None:
        api.create_branch(report.repo_id, branch=revision, exist_ok=True)
    commit = api.upload_folder(
        repo_id=report.repo_id,
        folder_path=root,
        allow_patterns=[glob.escape(name) for name in report.files],
        revision=revision,
        commit_message=message or "Upload a checkpoint by minifloat",
        create_pr=create_pr,
    )
    return str(commit.pr_url or commit.commit_url)
