"""Calibration rules: from the statistics of a tensor to one amax, and from the amax to a scale.

A rule is a frozen value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from minifloat.calibration.stats import ModuleStats
from minifloat.errors import UsageError, lookup
from minifloat.numerics.formats import E4M3, FLOAT32
from minifloat.numerics.histogram import BINS_PER_OCTAVE, Floats, bin_edges, count_magnitudes

Doubles = npt.NDArray[np.float64]


class Rule(ABC):
    """Computes the amax of a tensor from its statistics."""

    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def amax(self, module: ModuleStats) -> float:
        """Return the magnitude that the largest value of E4M3 will represent; 0 if all elements were zero."""

    def __str__(self) -> str:
        """Return the rule as text that `parse_rule` reads."""
        options = ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))  # type: ignore[arg-type]
        return f"{self.name}:{options}" if options else self.name


@dataclass(frozen=True)
class Max(Rule):
    """``max(amax)``: no element of the calibration text saturates. llm-compressor's ``static_minmax``."""

    name: ClassVar[str] = "max"
    summary: ClassVar[str] = "largest magnitude of all sequences: nothing that was seen saturates"

    def amax(self, module: ModuleStats) -> float:
        return module.max


class HistogramRule(Rule):
    """A rule that needs the histogram of magnitudes."""

    def amax(self, module: ModuleStats) -> float:
        """Return the result of `clip`, or 0 if all elements were zero."""
        return self.clip(module) if module.require_histogram(f"rule {self.name}")[1:].any() else 0.0

    @abstractmethod
    def clip(self, module: ModuleStats) -> float:
        """Return the amax of a module with at least one element that is not zero."""


@dataclass(frozen=True)
class Percentile(HistogramRule):
    """The magnitude that `percentile` % of the elements other than zero do not exceed."""

    name: ClassVar[str] = "percentile"
    summary: ClassVar[str] = "magnitude that 99.99% of the non-zero elements do not exceed (needs histograms)"

    percentile: float = 99.99

    def __post_init__(self) -> None:
        _require("percentile", self.percentile, 0.0 < self.percentile <= 100.0, "above 0 and at most 100")

    def clip(self, module: ModuleStats) -> float:
        # Zeros do not count: an input that is mostly zero, as after ReLU, would have a percentile of zero.
        counts = module.require_histogram(self.name)[1:]
        edges = bin_edges()[1:]
        cumulative = np.cumsum(counts)
        rank = self.percentile / 100.0 * cumulative[-1]
        index = int(np.searchsorted(cumulative, rank))
        fraction = 1.0 - (cumulative[index] - rank) / counts[index]
        return min(float(edges[index] + fraction * (edges[index + 1] - edges[index])), module.max)


@dataclass(frozen=True)
class MeanSquaredError(HistogramRule):
    """The amax with the smallest `expected_squared_error`."""

    name: ClassVar[str] = "mse"
    summary: ClassVar[str] = "clip with the smallest expected squared error (needs histograms)"

    octaves: int = 4

    def __post_init__(self) -> None:
        _require("octaves", self.octaves, self.octaves >= 1, "at least 1")

    def clip(self, module: ModuleStats) -> float:
        """Return the candidate with the smallest error."""
        edges = bin_edges()[1:]
        below = edges[edges < module.max][-self.octaves * BINS_PER_OCTAVE :]
        candidates = np.concatenate([[module.max], below[::-1]])
        errors = expected_squared_error(module, to_scale(candidates))
        # Candidates fall: of those with equal errors the largest wins.
        return float(candidates[np.argmin(errors)])


def expected_squared_error(module: ModuleStats, scales: npt.ArrayLike) -> Doubles:
    """Return the mean of ``(x - dequantize(quantize(x)))**2`` over the elements of a histogram, for each scale."""
    histogram = module.require_histogram("the squared error")
    known = module.amax[module.amax > 0]
    others = np.maximum(histogram - count_magnitudes(known), 0)
    used = np.flatnonzero(others[1:]) + 1
    edges = bin_edges()
    lower = edges[used]
    # One value per bin would be too coarse, because a bin is about as wide as a step of E4M3: elements are spread over
    # it.
    # The largest magnitude may be the lower edge of its bin: keep the bin wider than a point, which has no average.
    upper = np.maximum(np.minimum(edges[used + 1], module.max), lower * (1 + 2.0**-20))
    grid = np.array(E4M3.values[: E4M3.max_code + 1])
    scale = np.asarray(scales, np.float64)[..., None]
    integral = _error_integral(upper / scale, grid) - _error_integral(lower / scale, grid)
    spread = np.maximum(integral * scale / (upper - lower), 0.0) @ others[used]
    exact = known / scale
    points = np.sum((exact - grid[_nearest(exact, grid)]) ** 2, axis=-1)
    errors: Doubles = (spread + points) * scale[..., 0] ** 2 / max(histogram.sum(), 1)
    return errors


def _nearest(x: Doubles, grid: Doubles) -> npt.NDArray[np.int64]:
    """Return the index of the value of `grid` (ascending) nearest to each x; on a tie, of either neighbour."""
    return np.searchsorted((grid[1:] + grid[:-1]) / 2, x, side="right")


def _error_integral(x: Doubles, grid: Doubles) -> Doubles:
    """Return the integral of ``(t - nearest(t))**2`` over t from 0 to x."""
    starts = np.concatenate([[0.0], (grid[1:] + grid[:-1]) / 2])  # from here on, this grid value is the nearest
    pieces = ((starts[1:] - grid[:-1]) ** 3 - (starts[:-1] - grid[:-1]) ** 3) / 3
    before = np.concatenate([[0.0], np.cumsum(pieces)])
    index = _nearest(x, grid)
    full: Doubles = before[index] + ((x - grid[index]) ** 3 - (starts[index] - grid[index]) ** 3) / 3
    return full


RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Max, Percentile, MeanSquaredError)}

DEFAULT_RULE = Max()


def parse_rule(text: str) -> Rule:
    """Return the rule of a text such as ``max``, or ``percentile:percentile=99.9``."""
    name, _, option_text = text.partition(":")
    rule = lookup("calibration rule", name, RULES)
    kinds: dict[str, type] = {field.name: type(field.default) for field in fields(rule)}  # type: ignore[arg-type]
    if option_text and not kinds:
        raise UsageError(f"rule {name}: takes no options, found {option_text!r}")
    options: dict[str, object] = {}
    for item in filter(None, option_text.split(",")):
        key, _, value = item.partition("=")
        kind = lookup(f"option of rule {name}", key, kinds)
        try:
            options[key] = kind(value)
        except ValueError:
            raise UsageError(f"{key}: expected {kind.__name__}, found {value!r}") from None
    return rule(**options)


def to_scale(amax: npt.ArrayLike) -> Floats:
    """Return the scale with which E4M3's largest value decodes to `amax`: ``amax / E4M3.max`` in float32."""
    rounded = np.minimum(np.asarray(amax, np.float64), FLOAT32.max).astype(np.float32)
    return np.asarray(np.maximum(rounded / np.float32(E4M3.max), np.float32(FLOAT32.min_normal)))


def _require(option: str, value: object, valid: bool, expected: str) -> None:
    if not valid:
        raise UsageError(f"{option}: expected {expected}, found {value}")
