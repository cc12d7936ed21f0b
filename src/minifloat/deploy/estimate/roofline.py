"""The roofline (Williams et al., 2009): a step takes at least the time of its bytes, and of its operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minifloat.deploy.estimate.hardware import Hardware
from minifloat.deploy.estimate.shape import (
    ModelShape,
    attention_operations,
    cache_bytes,
    prefill_operations,
    state_bytes,
)
from minifloat.deploy.estimate.weights import Weights
from minifloat.numerics.formats import BFLOAT16, E2M1, E4M3, FLOAT32, ElementFormat
from minifloat.numerics.scheme import Scheme

#: A multiplication and an addition.
_OPERATIONS = 2


def step_bytes(weights: float, batch: int, cache: float) -> float:
    """Return the bytes that a decode step reads: the weights once, and the keys and values of every sequence."""
    return weights + batch * cache


def experts_read(experts: int, experts_per_token: int, tokens: int) -> float:
    """Return the expected share of a layer's experts that a step reads, 0 .. 1."""
    return 1.0 - (1.0 - experts_per_token / experts) ** tokens


@dataclass(frozen=True)
class StepCost:
    """Bytes and operations of one step on one device."""

    nbytes: float
    operations: Mapping[ElementFormat, float]
    tokens: int


@dataclass(frozen=True)
class Bound:
    """The least time of a step."""

    cost: StepCost
    memory_seconds: float  # time of its bytes at the bandwidth
    compute_seconds: float | None  # time of its operations at the peaks; None where the peaks are unknown

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.compute_seconds or 0.0)

    @property
    def limit(self) -> str:
        return "compute" if (self.compute_seconds or 0.0) > self.memory_seconds else "memory"

    @property
    def intensity(self) -> float:
        return sum(self.cost.operations.values()) / self.cost.nbytes

    @property
    def ridge(self) -> float | None:
        """The intensity at which both times are equal, for this mix of formats; None where peaks are unknown."""
        if self.compute_seconds is None:
            return None
        return self.intensity * self.memory_seconds / self.compute_seconds

    @property
    def throughput(self) -> float:
        return self.cost.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            "bytes": self.cost.nbytes,
            "operations": {element.name: count for element, count in self.cost.operations.items()},
            "tokens": self.cost.tokens,
            "memory_seconds": self.memory_seconds,
            "compute_seconds": self.compute_seconds,
            "seconds": self.seconds,
            "limit": self.limit,
            "intensity": self.intensity,
            "ridge": self.ridge,
            "tokens_per_second": self.throughput,
        }


def bound(cost: StepCost, hardware: Hardware) -> Bound:
    """Return the least time of a step on one device."""
    compute = None
    if hardware.peaks:
        compute = sum(count / hardware.peaks[element] for element, count in cost.operations.items())
    return Bound(cost, cost.nbytes / hardware.bandwidth, compute)


def arithmetic(scheme: Scheme | None, hardware: Hardware) -> ElementFormat:
    """Return the format in which a device multiplies the quantized weights of a scheme."""
    # MX formats are multiplied by machines that multiply FP4, E2M1 with E4M3 at the rate of E4M3; NVFP4 by NVIDIA only
    # (PTX ISA, `tcgen05.mma`; AMD CDNA 4 ISA, `V_MFMA_SCALE_F32_*_F8F6F4`).
    inputs = None if scheme is None else scheme.activation
    if scheme is None or inputs is None or inputs.element not in hardware.peaks:
        return BFLOAT16
    if inputs.scale is FLOAT32:
        return inputs.element if inputs.element is scheme.weight.element else BFLOAT16
    if E2M1 not in hardware.peaks or (inputs.scale is E4M3 and hardware.generation.vendor != "nvidia"):
        return BFLOAT16
    return inputs.element


def decode_cost(
    weights: Weights,
    shape: ModelShape,
    element: ElementFormat,
    cache: ElementFormat,
    context: int,
    batch: int,
    gpus: int,
) -> StepCost:
    """Return the cost of one new token for each of `batch` sequences, on one of `gpus` devices."""
    touched = experts_read(shape.experts, shape.experts_per_token, batch) if shape.experts else 0.0
    read = weights.fixed + weights.routed * touched
    attention = attention_operations(shape.cache, context) / gpus
    states = 2 * state_bytes(shape.cache, gpus)  # read and written
    return StepCost(
        step_bytes(read, batch, cache_bytes(shape.cache, context, cache, gpus) + states),
        _operations(weights, shape, element, batch, batch, batch * attention),
        batch,
    )


def prefill_cost(
    weights: Weights, shape: ModelShape, element: ElementFormat, cache: ElementFormat, context: int, gpus: int
) -> StepCost:
    """Return the cost of the prefill of one prompt of `context` tokens in one step, which writes the caches once."""
    touched = experts_read(shape.experts, shape.experts_per_token, context) if shape.experts else 0.0
    written = cache_bytes(shape.cache, context, cache, gpus) + state_bytes(shape.cache, gpus)
    nbytes = weights.fixed + weights.routed * touched + written
    attention = prefill_operations(shape.cache, context) / gpus
    return StepCost(nbytes, _operations(weights, shape, element, context, 1, attention), context)


def _operations(
    weights: Weights, shape: ModelShape, element: ElementFormat, tokens: int, sampled: int, attention: float
) -> Mapping[ElementFormat, float]:
    """Return operations by format; attention, lm_head, routers and unquantized weights are multiplied in BF16."""
    share = shape.experts_per_token / shape.experts if shape.experts else 0.0
    low = _OPERATIONS * tokens * (weights.quantized + weights.quantized_routed * share)
    high = _OPERATIONS * (tokens * (weights.plain + weights.plain_routed * share) + sampled * weights.head) + attention
    return {BFLOAT16: high + low} if element is BFLOAT16 else {BFLOAT16: high, element: low}
