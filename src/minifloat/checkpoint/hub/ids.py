"""Ids of models of the hub, their distinction from folders, and errors of the hub.

The name of an existing folder, and every `Path`, is a folder. Any other text is an id if the hub's rules for ids allow
it: ``NAME``, ``ORG/NAME``, or either with ``@REVISION`` after it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from minifloat.checkpoint.files import storage_errors
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
