"""The roofline: a step takes at least the time of its bytes at the bandwidth, and of its operations at the peak.

Bytes and operations overlap at best, so the bound is the larger of the two. Intensity is operations per byte; at the
ridge point of the hardware (peak over bandwidth) the two times are equal. Left out: launches, communication between
devices, and that no kernel reaches either limit.

Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minifloat.numerics.formats import ElementFormat
from minifloat.plan.hardware import Hardware


def step_bytes(weights: float, batch: int, cache: float) -> float:
    """Bytes that a decode step reads: the weights once, and keys and values of every sequence.

    Args:
        weights: Bytes of the weights that the step multiplies with.
        batch: Sequences.
        cache: Bytes of keys and values of one sequence.
    """
    return weights + batch * cache


def experts_read(experts: int, chosen: int, tokens: int) -> float:
    """The share of the experts of a layer that a step touches, 0 .. 1.

    The expectation where every token chooses `chosen` of `experts` evenly and independently of the others. Real
    routers are less even and touch fewer.
    """
    return 1.0 - (1.0 - chosen / experts) ** tokens


@dataclass(frozen=True)
class Work:
    """What one step of one device does.

    Attributes:
        nbytes: Bytes read from and written to memory.
        operations: Format of the arithmetic -> operations in it; a multiplication and an addition are two.
        tokens: Tokens that the step computes, over all devices.
    """

    nbytes: float
    operations: Mapping[ElementFormat, float]
    tokens: int


@dataclass(frozen=True)
class Bound:
    """The least time of a step.

    Attributes:
        work: The step.
        memory_seconds: Its bytes at the bandwidth.
        compute_seconds: Its operations at the peaks; None where those are unknown.
    """

    work: Work
    memory_seconds: float
    compute_seconds: float | None

    @property
    def seconds(self) -> float:
        """The larger of the two."""
        return max(self.memory_seconds, self.compute_seconds or 0.0)

    @property
    def limit(self) -> str:
        """``"memory"`` or ``"compute"``; at the ridge point, memory."""
        return "compute" if (self.compute_seconds or 0.0) > self.memory_seconds else "memory"

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return sum(self.work.operations.values()) / self.work.nbytes

    @property
    def ridge(self) -> float | None:
        """The intensity at which both times are equal, for this mix of formats; None where peaks are unknown."""
        if self.compute_seconds is None:
            return None
        return self.intensity * self.memory_seconds / self.compute_seconds

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return self.work.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "bytes": self.work.nbytes,
            "operations": {element.name: count for element, count in self.work.operations.items()},
            "tokens": self.work.tokens,
            "memory_seconds": self.memory_seconds,
            "compute_seconds": self.compute_seconds,
            "seconds": self.seconds,
            "limit": self.limit,
            "intensity": self.intensity,
            "ridge": self.ridge,
            "tokens_per_second": self.throughput,
        }


def bound(work: Work, hardware: Hardware) -> Bound:
    """The least time that `work` takes on one device."""
    compute = None
    if hardware.peaks:
        compute = sum(count / hardware.peaks[element] for element, count in work.operations.items())
    return Bound(work, work.nbytes / hardware.bandwidth, compute)


def smallest(holds: Callable[[int], bool], limit: int) -> int | None:
    """The smallest number from 1 to `limit` for which `holds` is true, and stays so; None where there is none."""
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
    """The largest number up to `limit` for which `holds` is true, as for all below it; 0 where it is not even for 1."""
    beyond = smallest(lambda number: not holds(number), limit)
    return limit if beyond is None else beyond - 1
