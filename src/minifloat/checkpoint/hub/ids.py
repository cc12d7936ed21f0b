"""Ids of models of the hub, and their distinction from folders.

The name of an existing folder, and every `Path`, is a folder. Any other text is an id if the hub's rules for ids allow
it: ``NAME``, ``ORG/NAME``, or either with ``@REVISION`` after it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from minifloat.errors import UsageError

_SNAPSHOTS, _PREFIX, _SLASH = "snapshots", "models--", "--"


class Origin(NamedTuple):
    """A model of the hub.

    Attributes:
        revision: A branch, tag or commit; None for the default branch.
    """

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
