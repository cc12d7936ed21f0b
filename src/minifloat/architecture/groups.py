"""Which linears a server runs as one: q, k and v, gate and up, the experts of a block; told from their names."""

from __future__ import annotations

import re

# The linears that servers fuse into one, by the last component of their names.
_FUSED_SIBLINGS = (
    ("qkv", ("q_proj", "k_proj", "v_proj")),
    ("qkv", ("query", "key", "value")),
    ("gate_up", ("gate_proj", "up_proj")),
    ("gate_up", ("w1", "w3")),
    ("qkv_a", ("q_a_proj", "kv_a_proj_with_mqa")),
)
_SIBLINGS = {name: (family, names) for family, names in _FUSED_SIBLINGS for name in names}
_EXPERT = re.compile(r"^(?P<parent>.*\.experts)(\.\d+)?\.\w+$")


def fused_group(module: str) -> str:
    """The name of the group that a server fuses `module` with; the module's own name where it is alone.

    Modules of one group share one scheme, and one scale where the scheme has one per tensor.
    """
    parent, _, leaf = module.rpartition(".")
    return f"{parent}.{_SIBLINGS[leaf][0]}" if leaf in _SIBLINGS else module


def expert_group(module: str) -> str | None:
    """The expert block that a module belongs to: servers run all its experts with one kernel, so with one scheme."""
    match = _EXPERT.match(module)
    return match["parent"] if match else None
