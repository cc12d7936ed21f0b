"""`push`: upload of a checkpoint to the hub, without the other files in its folder."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from minifloat.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint
from minifloat.checkpoint.files import list_folder, resolve_folder, resolve_inside, storage_errors
from minifloat.checkpoint.hub import Origin, first_line, hub_errors, is_hub_id
from minifloat.checkpoint.layout import HF_QUANT_CONFIG_FILE, OLLAMA_FILE, is_gguf, is_sidecar
from minifloat.checkpoint.rewrite import CARD_FILE, REPORT_FILE
from minifloat.deploy.check.document import DEPLOYMENT, deployment_section
from minifloat.deploy.check.judge import check_everywhere
from minifloat.deploy.check.subject import Subject
from minifloat.deploy.options import PushOptions
from minifloat.errors import CheckpointError, HubError, UnsafeFileError, UsageError
from minifloat.model.layouts import describe
from minifloat.model.layouts.gguf import require_package
from minifloat.report.document import Bullets, Document, ShortReport, Table, columns, section
from minifloat.report.markdown import add_metadata, markers, read_card, read_metadata, with_section, write_card
from minifloat.report.text import size_text

#: Names of the files to upload beside the shards and the sidecars.
_NAMED = (CONFIG_FILE, INDEX_FILE, HF_QUANT_CONFIG_FILE, REPORT_FILE, CARD_FILE)
_OPTIONS = {"license": "--license NAME (apache-2.0, mit, other, ...)", "base_model": "--base-model ORG/NAME"}


@dataclass(frozen=True, repr=False)
class PushReport(ShortReport):
    """Report on an upload, or on a dry run.

    Attributes:
        repo_id: The repository, ``ORG/NAME``.
        files: Sizes in bytes of the uploaded files, by name.
        left: Names of files and folders that are not uploaded.
        notes: Remarks for the user, in sentences.
        url: Address of the commit or the pull request; None for a dry run.
    """

    repo_id: str
    files: dict[str, int]
    left: tuple[str, ...]
    notes: tuple[str, ...]
    url: str | None = None

    def headline(self) -> dict[str, str]:
        return {
            "repository": self.repo_id,
            "files": f"{len(self.files)}, {size_text(self.nbytes)}",
            "uploaded": self.url or "no, a dry run",
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all uploaded files."""
        return sum(self.files.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"left": list(self.left), "notes": list(self.notes), "nbytes": self.nbytes}


def document(report: PushReport) -> Document:
    """Return the files that were, or would be, uploaded, and the address."""
    lines = [
        f"{len(report.files)} files, {size_text(report.nbytes)}.",
        *([f"Left here: {', '.join(report.left)}"] if report.left else []),
        *(f"Note: {note}" for note in report.notes),
        f"Nothing was sent to {report.repo_id}: a dry run." if report.url is None else report.url,
    ]
    files = Table(columns("file", "bytes"), [[name, size_text(nbytes)] for name, nbytes in report.files.items()])
    return Document(report.repo_id, [section("", files, Bullets(lines))])


def push_checkpoint(folder: str | os.PathLike[str], repo_id: str, options: PushOptions | None = None) -> PushReport:
    """Upload a checkpoint to the hub, and create the repository if it does not exist.

    The model card in the folder is completed first: with the given metadata, and with the repository's id in its
    commands.

    Args:
        folder: A checkpoint, or a folder of GGUF files.
        repo_id: ``ORG/NAME``.
        options: How to upload, and the card's metadata.

    Raises:
        UsageError: If the request is invalid, or the card lacks metadata that the options do not give.
        CheckpointError: If a file of the checkpoint is invalid, or the folder has no card.
        HubError: If the hub refuses a request or cannot be reached.
        StorageError: If the operating system refuses.
    """
    options = options or PushOptions()
    if not is_hub_id(repo_id):
        raise UsageError(f"expected the id of a model of the hub, ORG/NAME, got {repo_id!r}")
    root, quantized = resolve_folder(folder), True
    present = list_folder(root)
    given = {key: value for key in _OPTIONS if (value := getattr(options, key))}
    if CONFIG_FILE not in present and any(map(is_gguf, present)):
        card = _completed_card(root, given, quantized=quantized)
        files = _sizes(root, _gguf_files(root, present))
    else:
        with Checkpoint.open(root) as checkpoint:
            quantized = describe(checkpoint).layout is not None
            card = _completed_card(root, given, quantized=quantized)
            if markers(DEPLOYMENT)[0].encode() in card.content:
                engines = check_everywhere(Subject.of_checkpoint(checkpoint), repo_id)
                card = card.with_section(deployment_section(engines, repo_id))
            files = _sizes(root, [*checkpoint.shards, *checkpoint.sidecars(), *filter(_NAMED.__contains__, present)])
    files |= {CARD_FILE: len(card.content)}
    uploaded = {name.partition("/")[0] for name in files}
    left = tuple(sorted(name for name in present if name not in uploaded))
    report = PushReport(repo_id, files, left, () if quantized else ("The checkpoint is not quantized.",))
    if options.dry_run:
        return report
    card.require_models()
    card.write()
    with hub_errors(Origin(repo_id, options.revision), looked_up=False):
        try:
            url = _upload(root, report, options)
        except (ValueError, RuntimeError) as error:  # the hub refuses the metadata, or all retries failed
            raise HubError(repo_id, f"{first_line(error)}: {first_line(error.__cause__ or error)}") from error
    return replace(report, url=url)


def _gguf_files(root: Path, present: Collection[str]) -> list[str]:
    """Return the files of a folder of GGUF files to upload, of which the headers are checked."""
    require_package()
    from minifloat.model.layouts.gguf.reading import is_later_part, read_header

    files = sorted(filter(is_gguf, present))
    for name in files:
        if not is_later_part(name):
            read_header(resolve_inside(root, name))
    return [*files, *(name for name in present if name == OLLAMA_FILE or is_sidecar(name))]


def _sizes(root: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes in bytes of files, by name."""
    files = {}
    for name in sorted({*names}):
        path = resolve_inside(root, name)
        if not path.is_file():
            raise UnsafeFileError(path, "not a regular file")
        with storage_errors(path, "read its size"):
            files[name] = path.stat().st_size
    return files


@dataclass(frozen=True)
class _Card:
    """A model card and its metadata."""

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
            raise CheckpointError(path, "no model card; write one that describes the model") from None
        except ValueError as error:  # including UnicodeDecodeError
            raise CheckpointError(path, f"the metadata in its head cannot be read: {error}") from None

    def with_metadata(self, values: Mapping[str, Any]) -> _Card:
        content = add_metadata(self.content.decode("utf-8"), values) if values else self.content.decode("utf-8")
        return _Card(self.folder, content.encode(), {**self.metadata, **values})

    def with_section(self, section: str) -> _Card:
        return replace(self, content=with_section(self.content, section, self.folder / CARD_FILE))

    @property
    def base_models(self) -> list[str]:
        value = self.metadata.get("base_model") or []
        return [str(base) for base in (value if isinstance(value, list) else [value])]

    def require_models(self) -> None:
        """Raise unless the hub has every base model that the card names."""
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


def _completed_card(root: Path, options: Mapping[str, str], *, quantized: bool) -> _Card:
    card = _Card.read(root)
    path, metadata = root / CARD_FILE, card.metadata
    for key, value in options.items():
        if metadata.get(key) not in (None, [], "", value, [value]):
            raise UsageError(
                f"{path}: {key} is {metadata[key]!r} in the card, but the option is {value!r}; correct the card, or "
                "leave out the option"
            )
    new = {key: value for key, value in options.items() if not metadata.get(key)}
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


def _upload(root: Path, report: PushReport, options: PushOptions) -> str:
    """Create the repository and upload; return the address of the commit or of the pull request."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="minifloat")
    api.create_repo(report.repo_id, private=options.private or None, exist_ok=True)
    if options.private and not api.model_info(report.repo_id).private:
        raise HubError(report.repo_id, "exists and is public; make it private there, or leave out --private")
    if options.revision is not None:
        api.create_branch(report.repo_id, branch=options.revision, exist_ok=True)
    commit = api.upload_folder(
        repo_id=report.repo_id,
        folder_path=root,
        allow_patterns=[glob.escape(name) for name in report.files],
        revision=options.revision,
        commit_message=options.message or "Upload a checkpoint by minifloat",
        create_pr=options.create_pr,
    )
    return str(commit.pr_url or commit.commit_url)
