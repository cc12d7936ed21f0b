"""`QuantizedModel`: a checkpoint that is already quantized, as plans that leave every tensor as it is."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from minifloat.checkpoint import Checkpoint
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import Family, Role
from minifloat.model.architecture.groups import fused_group
from minifloat.model.architecture.mtp import is_mtp
from minifloat.model.architecture.roles import role_of
from minifloat.model.layouts import compressed_tensors, describe
from minifloat.model.layouts.inspection import format_name
from minifloat.model.layouts.stored import StoredWeight
from minifloat.model.plan.tensor_plan import Part, TensorPlan
from minifloat.numerics.scheme import Scheme


@dataclass(frozen=True)
class QuantizedModel:
    """A quantized checkpoint, written by any tool."""

    scheme: Scheme
    tensors: tuple[TensorPlan, ...]
    nbytes: int


def quantized_model(checkpoint: Checkpoint) -> QuantizedModel | None:
    """Return the weights of a quantized checkpoint; None if nothing in it is quantized."""
    description = describe(checkpoint)
    if not description.weights:
        return None
    family = family_of(checkpoint.config)
    plans = [_weight_plan(checkpoint, stored, family) for stored in description.weights.values()]
    elements: Counter[Scheme] = Counter()
    for plan in plans:
        for part in plan.parts:
            elements[part.scheme] += math.prod(part.shape)
    used = {name for stored in description.weights.values() for name in stored.tensors}
    plans += [
        TensorPlan(
            info,
            Role.VECTOR if name in description.auxiliary else role_of(info, family),
            drafts=is_mtp(name, checkpoint.config),
        )
        for name, info in checkpoint.tensors.items()
        if name not in used
    ]
    nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
    return QuantizedModel(elements.most_common(1)[0][0], tuple(plans), nbytes)


def _weight_plan(checkpoint: Checkpoint, stored: StoredWeight, family: Family) -> TensorPlan:
    scheme = Scheme(format_name(stored.spec, stored.activation), "", stored.spec, stored.activation)
    tensors = compressed_tensors.WRITER.weight_tensors(stored.module, stored.spec, stored.shape)
    part = Part(stored.module, scheme, stored.shape, tensors, fused_group(stored.module, family))
    drafts = is_mtp(stored.module, checkpoint.config)
    return TensorPlan(checkpoint.tensors[stored.codes], Role.LINEAR, (part,), drafts=drafts)
