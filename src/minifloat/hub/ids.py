"""What names a folder and what a model of the hub, and which model a folder of the hub's cache is.

A folder that exists wins; a `Path` is always a folder. What is left is an id where the hub's rules for ids allow it:
``NAME``, ``ORG/NAME``, or either with ``@REVISION`` after it.
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
        repo_id: ``ORG/NAME``, or ``NAME``.
        revision: A branch, tag or commit; None: the default branch.
    """

    repo_id: str
    revision: str | None

    def __str__(self) -> str:
        """As `parse` reads it."""
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"


def hub_id(model: str | os.PathLike[str], revision: str | None = None) -> Origin | None:
    """The model of the hub that is meant, or None where a folder is.

    Args:
        model: A folder or an id.
        revision: Of an id that has no ``@REVISION``.

    Raises:
        UsageError: A revision of a folder, or two of an id.
    """
    found = None if isinstance(model, os.PathLike) or os.path.lexists(model) else _parse(model)
    if found is None:
        if revision is not None:
            raise UsageError(f"revision {revision!r}: models of the hub have revisions; {model} is a folder")
        return None
    if revision is None:
        return found
    if found.revision not in (None, revision):
        raise UsageError(f"{model}: two revisions, {found.revision!r} and {revision!r}; give one")
    return Origin(found.repo_id, revision)


def is_hub_id(text: str) -> bool:
    """Whether the hub allows this as the id of a model, without a revision."""
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
    """The model and the commit whose snapshot in the hub's cache a folder is; None for any other folder."""
    cached = folder.parent.parent.name
    if folder.parent.name != _SNAPSHOTS or not cached.startswith(_PREFIX):
        return None
    return Origin(cached.removeprefix(_PREFIX).replace(_SLASH, "/"), folder.name)


def model_name(model: str | os.PathLike[str]) -> str:
    """What to call a model: its id if it is of the hub, or in the hub's cache, else its folder's name."""
    folder = Path(model).resolve()
    origin = hub_id(model) or origin_of(folder)
    return folder.name if origin is None else origin.repo_id
