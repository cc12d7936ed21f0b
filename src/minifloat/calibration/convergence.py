"""Convergence of calibration: how each scale moved from sequence to sequence, and whether it has settled.

A scale has settled when more text of the same kind no longer changes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minifloat.calibration.rules import DEFAULT_RULE, HistoryRule, Rule, to_scale
from minifloat.calibration.stats import ActivationStats
from minifloat.errors import UsageError
from minifloat.numerics.formats import E4M3, ElementFormat
from minifloat.numerics.histogram import Floats

DEFAULT_TOLERANCE = 0.01
DEFAULT_WINDOW = 32


@dataclass(frozen=True)
class Convergence:
    """How one scale moved."""

    settled_after: int | None
    change: float

    @property
    def settled(self) -> bool:
        """Whether the scale has stopped moving."""
        return self.settled_after is not None


@dataclass(frozen=True)
class ConvergenceReport:
    """How all scales of a model moved."""

    scales: Mapping[str, Convergence]
    sequences: int
    tolerance: float
    window: int

    @property
    def unsettled(self) -> tuple[str, ...]:
        """The scales that have not settled, with the largest change first."""
        changes = {name: entry.change for name, entry in self.scales.items() if not entry.settled}
        return tuple(sorted(changes, key=lambda name: -changes[name]))


def trajectory(amax: Floats, rule: Rule = DEFAULT_RULE, element: ElementFormat = E4M3) -> Floats:
    """Return the scale after each sequence."""
    if not isinstance(rule, HistoryRule):
        raise UsageError(f"rule {rule.name}: has no value per sequence; judge convergence by max")
    return to_scale(rule.running(amax), element)


def settled(
    trajectory: npt.NDArray[np.floating], tolerance: float = DEFAULT_TOLERANCE, window: int = DEFAULT_WINDOW
) -> bool:
    """Return whether the scale stayed within `tolerance` of its final value over the last `window` sequences."""
    return _convergence(trajectory, tolerance, window).settled


def convergence_report(
    stats: ActivationStats,
    rule: Rule = DEFAULT_RULE,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    window: int = DEFAULT_WINDOW,
) -> ConvergenceReport:
    """Return how the scales of a model moved over the sequences, in order."""
    scales = {}
    for name, module in stats.inputs.items():
        reached = module.tokens > 0
        moving = _over_all_sequences(trajectory(module.amax[reached], rule), reached)
        scales[f"{name}.input_scale"] = _convergence(moving, tolerance, window)
    for name, kv in stats.kv.items():
        for scale, amax in (("k_scale", kv.k_amax), ("v_scale", kv.v_amax)):
            scales[f"{name}.{scale}"] = _convergence(trajectory(amax.max(axis=1), rule), tolerance, window)
    return ConvergenceReport(scales, stats.sequences, tolerance, window)


def _convergence(trajectory: npt.NDArray[np.floating], tolerance: float, window: int) -> Convergence:
    if not trajectory.size or trajectory[-1] == 0:
        return Convergence(None, math.inf)
    distance = np.abs(trajectory / trajectory[-1].astype(np.float64) - 1.0)
    change = float(distance[-window - 1 :].max())
    if len(trajectory) <= window or change > tolerance:
        return Convergence(None, change)
    outside = np.flatnonzero(distance > tolerance)
    return Convergence(int(outside[-1]) + 2 if outside.size else 1, change)


def _over_all_sequences(trajectory: Floats, reached: npt.NDArray[np.bool_]) -> Floats:
    """Return a trajectory over all sequences: a sequence that did not reach the module repeats the scale before it."""
    steps = np.concatenate([np.zeros(1, np.float32), trajectory])
    repeated: Floats = steps[np.cumsum(reached)]
    return repeated
