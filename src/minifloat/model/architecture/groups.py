"""Groups of linears that a server fuses (q, k and v; gate and up; the experts of a block), found by their names."""

from __future__ import annotations

import re

from minifloat.model.architecture.family import GENERAL, Family

#: Name of the group and last components of the names of linears that servers fuse into one.
_FUSED_SIBLINGS = (
    ("qkv", ("q_proj", "k_proj", "v_proj")),
    ("qkv", ("query", "key", "value")),
    ("gate_up", ("gate_proj", "up_proj")),
    ("gate_up", ("w1", "w3")),
    ("qkv_a", ("q_a_proj", "kv_a_proj_with_mqa")),
)
_GROUP_OF_LEAF = {leaf: group for group, leaves in _FUSED_SIBLINGS for leaf in leaves}
_EXPERT = re.compile(r"^(?P<parent>.*\.experts)(\.\d+)?\.\w+$")


def fused_group(module: str, family: Family = GENERAL) -> str:
    """Return the name of the group of linears that a server fuses; the module's own name if it is not fused.

    Modules of one group share one scheme and, for schemes with one scale per tensor, one scale.
    """
    parent, _, leaf = module.rpartition(".")
    group = next((group for group, leaves in family.fused if leaf in leaves), _GROUP_OF_LEAF.get(leaf))
    return module if group is None else f"{parent}.{group}"


def expert_group(module: str) -> str | None:
    """Return the name of the expert block of a module, None for other modules.

    Servers run all experts of a block with one kernel, so they must share one scheme.
    """
    match = _EXPERT.match(module)
    return match["parent"] if match else None


def serving_group(module: str, family: Family = GENERAL) -> str:
    """Return the name of the group of modules that servers run as one and that must share a scheme.

    It is the block of a routed expert, else the group of fused linears, else the module itself.
    """
    return expert_group(module) or fused_group(module, family)
