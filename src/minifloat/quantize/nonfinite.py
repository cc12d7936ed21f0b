"""Copied tensors that may hold NaN or Inf because the model does not read them, as masks that old checkpoints store."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from minifloat.checkpoint import Checkpoint
from minifloat.errors import PatternError

_SUFFIX = " NaN or Inf"


class Copied(NamedTuple):
    """What came of a copy: the digest of its source, and how many values are NaN or Inf."""

    digest: str
    nonfinite: int = 0


def tensors_allowed(checkpoint: Checkpoint, pattern: str | None) -> frozenset[str]:
    """Return the tensors that may hold NaN or Inf; raise an error for a pattern that matches none."""
    if pattern is None:
        return frozenset()
    try:
        names = frozenset(name for name in checkpoint.tensors if re.search(pattern, name))
    except re.error as error:
        raise PatternError(f"allow_nonfinite: {pattern!r} is not a regular expression: {error}") from error
    if not names:
        raise PatternError(f"allow_nonfinite: {pattern!r} matches no tensor")
    return names


def nonfinite_detail(nonfinite: int) -> str:
    """Return what the row of a tensor says where it holds NaN or Inf that were allowed."""
    return f", {nonfinite}{_SUFFIX}" if nonfinite else ""


def nonfinite_notes(rows: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return a sentence on the tensors, of pairs of name and detail, that hold NaN or Inf."""
    names = [name for name, detail in rows if detail.endswith(_SUFFIX)]
    return (f"NaN or Inf were copied, as allowed: {', '.join(names)}.",) if names else ()
