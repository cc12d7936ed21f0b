"""Errors of the hub, converted to messages that name the model and the cure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from minifloat.checkpoint.files import storage_errors
from minifloat.checkpoint.hub.ids import Origin
from minifloat.errors import HubError

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
