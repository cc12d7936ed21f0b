"""Rules: how what calibration saw of a tensor becomes one amax, and an amax one scale.

A rule is a frozen value. Those of the history look at the amax of each sequence, those of the histogram at how often
each magnitude occurred; a new rule is a class here and a row in `RULES`. Which modules share a scale, and what becomes
of those that were not seen, is decided in `scales`.

The scales here multiply to dequantize, as in every checkpoint. Transformer Engine's multiply to quantize: its `scale`
is the inverse of ours.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from minifloat.calibration.stats import ModuleStats
from minifloat.errors import UsageError, lookup
from minifloat.numerics.formats import E4M3, FLOAT32, ElementFormat
from minifloat.numerics.histogram import BINS_PER_OCTAVE, Counts, Floats, bin_edges, count_magnitudes

Doubles = npt.NDArray[np.float64]


class Rule(ABC):
    """How the statistics of one tensor become its amax."""

    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def amax(self, module: ModuleStats, element: ElementFormat = E4M3) -> float:
        """The magnitude that the largest value of `element` will stand for; 0 where nothing but zeros was seen.

        Raises:
            UsageError: The rule needs a histogram, and none was observed.
        """

    def __str__(self) -> str:
        """As `parse_rule` reads it."""
        options = ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))  # type: ignore[arg-type]
        return f"{self.name}:{options}" if options else self.name


class HistoryRule(Rule):
    """A rule that needs the amax of each sequence, in their order, and nothing else."""

    @abstractmethod
    def running(self, amax: Floats) -> Doubles:
        """What the rule gives after each sequence.

        Args:
            amax: float32 `[S]`, or `[S, heads]` for each head by itself; only sequences that the module saw.

        Returns:
            float64 of the same shape.
        """

    def amax(self, module: ModuleStats, element: ElementFormat = E4M3) -> float:
        """The rule after the last sequence that the module saw; sequences without a token for it do not count."""
        seen = module.amax[module.tokens > 0]
        return float(self.running(seen)[-1]) if len(seen) else 0.0


@dataclass(frozen=True)
class Max(HistoryRule):
    """``max(amax)``: nothing that was seen saturates. llm-compressor's ``static_minmax``."""

    name: ClassVar[str] = "max"
    summary: ClassVar[str] = "largest magnitude of all sequences: nothing that was seen saturates"

    def running(self, amax: Floats) -> Doubles:
        """The largest so far."""
        return np.maximum.accumulate(amax.astype(np.float64))


@dataclass(frozen=True)
class MostRecent(HistoryRule):
    """``amax[-1]``: the last sequence alone. For comparison; it forgets everything before."""

    name: ClassVar[str] = "most-recent"
    summary: ClassVar[str] = "largest magnitude of the last sequence alone"

    def running(self, amax: Floats) -> Doubles:
        """The history itself."""
        return amax.astype(np.float64)


@dataclass(frozen=True)
class Delayed(HistoryRule):
    """Transformer Engine's delayed scaling: ``max(amax[-history:]) * 2**margin``.

    There ``scale = (fp8_max / amax) / 2**margin``. Where amax is 0 or not finite it keeps the scale it had, 1.0 at
    first; such statistics are refused here.

    Source: Transformer Engine, `common.recipe.DelayedScaling`.

    Attributes:
        history: Sequences that are remembered (``amax_history_len``).
        margin: Octaves of headroom.
        algo: ``"max"`` over the history, or its ``"most_recent"`` entry (``amax_compute_algo``).
    """

    name: ClassVar[str] = "delayed"
    summary: ClassVar[str] = (
        "Transformer Engine's delayed scaling: the last `history` sequences, `margin` octaves added"
    )

    history: int = 1024
    margin: int = 0
    algo: str = "max"

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: One is out of range.
        """
        lookup("algo of rule delayed", self.algo, dict.fromkeys(("max", "most_recent")))
        _require("history", self.history, self.history >= 1, "at least 1")
        _require("margin", self.margin, abs(self.margin) < FLOAT32.bias, f"between -{FLOAT32.bias} and {FLOAT32.bias}")

    def running(self, amax: Floats) -> Doubles:
        """The largest of the last `history` entries so far, or the last one; times ``2**margin``."""
        history = min(self.history, len(amax)) if self.algo == "max" else 1
        if history <= 1:
            return self._with_margin(amax.astype(np.float64))
        before = np.zeros((history - 1, *amax.shape[1:]))
        windows = np.lib.stride_tricks.sliding_window_view(np.concatenate([before, amax]), history, axis=0)
        return self._with_margin(windows.max(axis=-1))

    def _with_margin(self, amax: Doubles) -> Doubles:
        return amax * 2.0**self.margin


@dataclass(frozen=True)
class MovingAverage(HistoryRule):
    """``a = a + averaging_constant * (amax[i] - a)``, starting from ``a = amax[0]``.

    What torch's ``MovingAverageMinMaxObserver`` and llm-compressor's default for activations do with minimum and
    maximum, done to their larger magnitude. It lies below the maximum, so something that was seen saturates.

    Attributes:
        averaging_constant: Weight of the newest sequence.
    """

    name: ClassVar[str] = "moving-average"
    summary: ClassVar[str] = "exponential average over the sequences; saturates what is above it"

    averaging_constant: float = 0.01

    def __post_init__(self) -> None:
        """Check the option.

        Raises:
            UsageError: It is out of range.
        """
        constant = self.averaging_constant
        _require("averaging_constant", constant, 0.0 < constant <= 1.0, "above 0 and at most 1")

    def running(self, amax: Floats) -> Doubles:
        """The average so far."""
        steps = itertools.accumulate(amax.astype(np.float64), lambda a, new: a + self.averaging_constant * (new - a))
        return np.array(list(steps), np.float64).reshape(amax.shape)


class HistogramRule(Rule):
    """A rule that needs how often each magnitude occurred."""

    def amax(self, module: ModuleStats, element: ElementFormat = E4M3) -> float:
        """What `clip` chooses; 0 where the histogram has zeros alone."""
        return self.clip(module, element) if histogram_of(module, f"rule {self.name}")[1:].any() else 0.0

    @abstractmethod
    def clip(self, module: ModuleStats, element: ElementFormat) -> float:
        """The amax of a module whose histogram has more than zeros."""


@dataclass(frozen=True)
class Percentile(HistogramRule):
    """The magnitude that `percentile` % of the elements other than zero do not exceed.

    Zeros do not count: an input that is mostly zero, as after ReLU, would have a percentile of zero. The magnitude is
    interpolated linearly within its bin, an eighth of an octave, and is never above the largest that was seen.

    Attributes:
        percentile: In percent.
    """

    name: ClassVar[str] = "percentile"
    summary: ClassVar[str] = "magnitude that 99.99% of the non-zero elements do not exceed (needs histograms)"

    percentile: float = 99.99

    def __post_init__(self) -> None:
        """Check the option.

        Raises:
            UsageError: It is out of range.
        """
        _require("percentile", self.percentile, 0.0 < self.percentile <= 100.0, "above 0 and at most 100")

    def clip(self, module: ModuleStats, element: ElementFormat) -> float:
        """The percentile."""
        counts = histogram_of(module, self.name)[1:]
        edges = bin_edges()[1:]
        cumulative = np.cumsum(counts)
        rank = self.percentile / 100.0 * cumulative[-1]
        index = int(np.searchsorted(cumulative, rank))
        fraction = 1.0 - (cumulative[index] - rank) / counts[index]
        return min(float(edges[index] + fraction * (edges[index + 1] - edges[index])), module.max)


@dataclass(frozen=True)
class MeanSquaredError(HistogramRule):
    """The clip with the smallest `expected_squared_error`.

    Candidates are the largest magnitude that was seen and the bin edges of the `octaves` octaves below it; of equals
    the largest is taken. Floating point loses little at the small end, so this rarely clips much.

    Attributes:
        octaves: How far below the largest magnitude to look.
    """

    name: ClassVar[str] = "mse"
    summary: ClassVar[str] = "clip with the smallest expected squared error (needs histograms)"

    octaves: int = 4

    def __post_init__(self) -> None:
        """Check the option.

        Raises:
            UsageError: It is out of range.
        """
        _require("octaves", self.octaves, self.octaves >= 1, "at least 1")

    def clip(self, module: ModuleStats, element: ElementFormat) -> float:
        """The best candidate."""
        edges = bin_edges()[1:]
        below = edges[edges < module.max][-self.octaves * BINS_PER_OCTAVE :]
        candidates = np.concatenate([[module.max], below[::-1]])
        errors = expected_squared_error(module, to_scale(candidates, element), element)
        return float(candidates[np.argmin(errors)])


RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (Max, MostRecent, Delayed, MovingAverage, Percentile, MeanSquaredError)
}

DEFAULT_RULE = Max()


def history_rule(rule: Rule) -> HistoryRule:
    """The rule where only the amax history is there, as for K and V: itself, or the default if it needs histograms."""
    return rule if isinstance(rule, HistoryRule) else DEFAULT_RULE


def parse_rule(text: str) -> Rule:
    """A rule as one writes it on a command line: ``max``, ``percentile:percentile=99.9``, ``delayed:margin=1``.

    Raises:
        UnknownNameError: No such rule or option; the message lists the valid names.
        UsageError: A value that the option cannot have.
    """
    name, _, given = text.partition(":")
    rule = lookup("calibration rule", name, RULES)
    kinds: dict[str, type] = {field.name: type(field.default) for field in fields(rule)}  # type: ignore[arg-type]
    if given and not kinds:
        raise UsageError(f"rule {name}: takes no options, found {given!r}")
    options: dict[str, object] = {}
    for item in filter(None, given.split(",")):
        key, _, value = item.partition("=")
        kind = lookup(f"option of rule {name}", key, kinds)
        try:
            options[key] = kind(value)
        except ValueError:
            raise UsageError(f"{key}: expected {kind.__name__}, found {value!r}") from None
    return rule(**options)


def to_scale(amax: npt.ArrayLike, element: ElementFormat = E4M3) -> Floats:
    """The scale with which `element`'s largest value decodes to `amax`: ``amax / element.max`` in float32.

    Args:
        amax: Finite, not negative, of any shape.
        element: Format of the quantized elements.

    Returns:
        float32 of the same shape; never below the smallest normal float32, which stands for a smaller quotient.
    """
    rounded = np.minimum(np.asarray(amax, np.float64), FLOAT32.max).astype(np.float32)
    return np.asarray(np.maximum(rounded / np.float32(element.max), np.float32(FLOAT32.min_normal)))


def histogram_of(module: ModuleStats, who: str) -> Counts:
    """The histogram of a module.

    Raises:
        UsageError: None was observed.
    """
    if module.histogram is None:
        raise UsageError(f"{who}: these statistics have no histograms; calibrate again with histograms")
    return module.histogram


def expected_squared_error(module: ModuleStats, scales: npt.ArrayLike, element: ElementFormat = E4M3) -> Doubles:
    """Mean of ``(x - dequantize(quantize(x)))**2`` over the elements of a histogram, for each of some scales.

    The amax of each sequence is an element whose value is known; outliers, which decide where to clip, are such. The
    others of a bin stand for magnitudes spread evenly over it, over which the error is integrated exactly. (One value
    for all of a bin would not do: a bin is about as wide as a step of E4M3.)

    Args:
        module: With a histogram.
        scales: Any shape; each multiplies to dequantize.
        element: Format of the quantized elements.

    Returns:
        float64, of the shape of `scales`.

    Raises:
        UsageError: No histogram was observed.
    """
    histogram = histogram_of(module, "the squared error")
    known = module.amax[module.amax > 0]
    others = np.maximum(histogram - count_magnitudes(known), 0)
    used = np.flatnonzero(others[1:]) + 1
    edges = bin_edges()
    lower = edges[used]
    # A bin never shrinks to a point, which would have no average: the largest magnitude may be its lower edge.
    upper = np.maximum(np.minimum(edges[used + 1], module.max), lower * (1 + 2.0**-20))
    grid = np.array(element.values[: element.max_code + 1])
    scale = np.asarray(scales, np.float64)[..., None]
    integral = _error_integral(upper / scale, grid) - _error_integral(lower / scale, grid)
    spread = np.maximum(integral * scale / (upper - lower), 0.0) @ others[used]
    exact = known / scale
    points = np.sum((exact - grid[_nearest(exact, grid)]) ** 2, axis=-1)
    errors: Doubles = (spread + points) * scale[..., 0] ** 2 / max(histogram.sum(), 1)
    return errors


def _nearest(x: Doubles, grid: Doubles) -> npt.NDArray[np.int64]:
    """Index of the value of `grid` (ascending) nearest to each x; of either where both are as near."""
    return np.searchsorted((grid[1:] + grid[:-1]) / 2, x, side="right")


def _error_integral(x: Doubles, grid: Doubles) -> Doubles:
    """The integral of ``(t - nearest(t))**2`` over t from 0 to x."""
    starts = np.concatenate([[0.0], (grid[1:] + grid[:-1]) / 2])  # each value attracts what is from here on
    pieces = ((starts[1:] - grid[:-1]) ** 3 - (starts[:-1] - grid[:-1]) ** 3) / 3
    before = np.concatenate([[0.0], np.cumsum(pieces)])
    index = _nearest(x, grid)
    full: Doubles = before[index] + ((x - grid[index]) ** 3 - (starts[index] - grid[index]) ** 3) / 3
    return full


def _require(option: str, value: object, valid: bool, expected: str) -> None:
    if not valid:
        raise UsageError(f"{option}: expected {expected}, found {value}")
