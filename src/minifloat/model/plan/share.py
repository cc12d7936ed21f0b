"""`QuantizedShare`: how much of a model's linear weights a plan quantizes, and why the rest keeps its precision.

Little is usually quantized of a model whose names the general rules do not know; `require_share` refuses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from minifloat.errors import UsageError
from minifloat.model.architecture.family import Role
from minifloat.model.plan.tensor_plan import QuantizationPlan, TensorPlan
from minifloat.report.text import layer_pattern, size_text

#: Share of the linear weights below which `require_share` refuses a plan.
SMALLEST = 0.5
_MATRIX = 2
_NOT_LINEAR = (Role.EMBEDDING, Role.LM_HEAD, Role.TOWER, Role.VECTOR)


@dataclass(frozen=True)
class KeptWeights:
    """Linear weights that keep the model's precision for one reason."""

    reason: str
    count: int
    elements: int
    nbytes: int
    example: str
    asked: bool

    def __str__(self) -> str:
        """Return one phrase with reason, number and size."""
        tensors = "tensor" if self.count == 1 else "tensors"
        return f"{self.reason}: {self.count} {tensors} of {size_text(self.nbytes)}, as {self.example}"


@dataclass(frozen=True)
class QuantizedShare:
    """The quantized part of a model's linear weights, in parameters."""

    quantized: int
    total: int
    kept: tuple[KeptWeights, ...]

    @classmethod
    def of(cls, plan: QuantizationPlan) -> QuantizedShare:
        asked = {str(override) for override in plan.overrides}
        quantized = total = 0
        kept: dict[str, list[TensorPlan]] = {}
        for tensor in plan.tensors:
            if tensor.role in _NOT_LINEAR or len(tensor.source.shape) < _MATRIX:
                continue
            elements = math.prod(tensor.source.shape)
            total += elements
            if tensor.parts:
                quantized += elements
            else:
                kept.setdefault(tensor.reason, []).append(tensor)
        groups = [_kept(reason, tensors, asked=reason in asked) for reason, tensors in kept.items()]
        return cls(quantized, total, tuple(sorted(groups, key=lambda group: -group.elements)))

    @property
    def fraction(self) -> float:
        return self.quantized / self.total if self.total else 0.0

    @property
    def unasked_fraction(self) -> float:
        """The share that is quantized of all that no override keeps, 0 .. 1."""
        total = self.total - sum(group.elements for group in self.kept if group.asked)
        return self.quantized / total if total else 0.0

    def __str__(self) -> str:
        return f"{_percent(self.fraction)} of the linear weights are quantized"

    def to_dict(self) -> dict[str, Any]:
        return {
            "quantized": self.quantized,
            "total": self.total,
            "kept": [
                {"reason": group.reason, "tensors": group.count, "elements": group.elements, "bytes": group.nbytes}
                for group in self.kept
            ],
        }


def _kept(reason: str, tensors: list[TensorPlan], *, asked: bool) -> KeptWeights:
    infos = [tensor.source for tensor in tensors]
    elements, nbytes = sum(math.prod(info.shape) for info in infos), sum(info.nbytes for info in infos)
    return KeptWeights(reason, len(infos), elements, nbytes, layer_pattern(infos[0].name), asked)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"


def require_share(plan: QuantizationPlan) -> None:
    """Refuse a plan that quantizes less than half of a model's linear weights, not counting those kept by overrides."""
    share = QuantizedShare.of(plan)
    if share.unasked_fraction >= SMALLEST:
        return
    left = "; ".join(str(group) for group in share.kept if not group.asked)
    raise UsageError(
        f"only {_percent(share.unasked_fraction)} of the linear weights would be quantized, by parameters, without "
        f"embeddings and lm_head; the rest keeps its precision ({left}). --override 'REGEX=SCHEME' quantizes matrices, "
        "fused experts need a description of their family (minifloat.model.architecture.families); "
        "--allow-partial accepts this"
    )
