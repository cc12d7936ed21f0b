"""The roofline: a step takes at least the time of its bytes at the bandwidth, and of its operations at the peak rate.

Bytes and operations overlap at best, so the bound is the larger of the two. Intensity is operations per byte; at the
ridge point of the hardware (peak over bandwidth) the two times are equal. Left out: launches and communication
between devices. No kernel reaches either limit.

Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minifloat.deploy.estimate.hardware import Hardware
from minifloat.numerics.formats import ElementFormat


def step_bytes(weights: float, batch: int, cache: float) -> float:
    """Return the bytes that a decode step reads: the weights once, and the keys and values of every sequence."""
    return weights + batch * cache


def experts_read(experts: int, experts_per_token: int, tokens: int) -> float:
    """Return the expected share of a layer's experts that a step reads, 0 .. 1.

    The formula assumes that every token visits `experts_per_token` of `experts` with equal probability, independently
    of other tokens. Real routers are less even, so that a step reads fewer experts.
    """
    return 1.0 - (1.0 - experts_per_token / experts) ** tokens


@dataclass(frozen=True)
class StepCost:
    """Bytes and operations of one step on one device."""

    nbytes: float
    operations: Mapping[ElementFormat, float]
    tokens: int


@dataclass(frozen=True)
class Bound:
    """The least time of a step.

    Attributes:
        memory_seconds: Time of its bytes at the bandwidth.
        compute_seconds: Time of its operations at the peaks; None where the peaks are unknown.
    """

    cost: StepCost
    memory_seconds: float
    compute_seconds: float | None

    @property
    def seconds(self) -> float:
        """The least time: the larger of `memory_seconds` and `compute_seconds`."""
        return max(self.memory_seconds, self.compute_seconds or 0.0)

    @property
    def limit(self) -> str:
        """``"memory"`` or ``"compute"``; at the ridge point, memory."""
        return "compute" if (self.compute_seconds or 0.0) > self.memory_seconds else "memory"

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return sum(self.cost.operations.values()) / self.cost.nbytes

    @property
    def ridge(self) -> float | None:
        """The intensity at which both times are equal, for this mix of formats; None where peaks are unknown."""
        if self.compute_seconds is None:
            return None
        return self.intensity * self.memory_seconds / self.compute_seconds

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return self.cost.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the bound as JSON values."""
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


def smallest(holds: Callable[[int], bool], limit: int) -> int | None:
    """Return the smallest number from 1 to `limit` for which `holds` is true, or None; it must stay true above that."""
    high = 1
    while not holds(high):
        if high >= limit:
            return None
        high = min(2 * high, limit)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def largest(holds: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to `limit` for which `holds` is true, or 0; it must be true below that."""
    beyond = smallest(lambda number: not holds(number), limit)
    return limit if beyond is None else beyond - 1
