"""What several commands take: MODEL, a folder or a model of the hub, and its revision. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])

#: A folder, or ORG/NAME[@REVISION]. The text as it was typed: ``./NAME`` is a folder and ``NAME`` may be an id.
MODEL = click.Path()


def revision_option(of: str = "MODEL") -> Callable[[_Command], _Command]:
    """The option ``--revision``.

    Args:
        of: The argument that it belongs to.
    """
    return click.option(
        "--revision", metavar="REV", help=f"Branch, tag or commit of {of} on the hub; {of}@REV is the same."
    )
