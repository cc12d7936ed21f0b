"""How a model's unquantized checkpoints store experts that a quantized one has one by one.

This module imports torch and transformers only for a family without a row that says so.
"""

from __future__ import annotations

from collections.abc import Iterable

from minifloat.checkpoint import Checkpoint
from minifloat.errors import ConfigError
from minifloat.model.architecture.family import Family, SingleExpert


def stored_fused_as(checkpoint: Checkpoint, family: Family, places: Iterable[SingleExpert]) -> bool | None:
    """Return whether the tensors of fused experts are transposed, ``[E, K, N]``; None: experts are stored one by one.

    Where the row of the family does not say it, experts are stored fused if transformers makes nothing of single ones.
    """
    first = next(iter(places), None)
    if first is None or family.stored_fused is False:
        return None
    if family.stored_fused:
        return first.fused.transposed
    import torch

    from minifloat.model.runtime.build import empty_model
    from minifloat.model.runtime.names import ExpertStack, assign

    try:
        model = empty_model(checkpoint, torch.bfloat16)
    except ConfigError:
        return None
    names = [f"{first.parent}{linear.format(first.expert)}.weight" for linear in first.fused.linears]
    for assignment in assign(model, names)[0]:
        if isinstance(assignment.converter, ExpertStack):
            return assignment.converter.transposed
    return None
