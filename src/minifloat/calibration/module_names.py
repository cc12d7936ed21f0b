"""Order and groups of module names for reports: as a decoder runs them, and by the input that they share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minifloat.model.architecture.roles import fused_group
from minifloat.report.text import split_layer

#: The linears of a layer in the order in which they run; other linears come after them.
_LINEARS = ("q", "k", "v", "o", "gate", "w1", "up", "w3", "down", "w2")


def running_order(module: str) -> tuple[Any, ...]:
    """Return a sort key that orders modules as a decoder runs them: by layer, attention first, then experts."""
    parent, _, leaf = module.rpartition(".")
    numbered = [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parent.split(".")]
    role = leaf.removesuffix("_proj")
    rank = _LINEARS.index(role) if role in _LINEARS else len(_LINEARS)
    return split_layer(module)[0], "attn" not in parent, numbered, rank, leaf


def group_by_input(modules: Iterable[str]) -> dict[str, list[str]]:
    """Return the modules that share an input, by the name of their group, in the order of `modules`."""
    groups: dict[str, list[str]] = {}
    for name in modules:
        groups.setdefault(fused_group(name), []).append(name)
    return groups


def joined(names: Iterable[str]) -> str:
    """Return names with a common parent as one text: ``self_attn.q_proj / k_proj / v_proj``."""
    first, *others = sorted(set(names), key=running_order)
    return " / ".join([first, *(name.rpartition(".")[2] for name in others)])
