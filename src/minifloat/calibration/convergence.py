"""Has calibration seen enough? How each scale moved from sequence to sequence, and which ones still do.

A scale has settled when more text of the same kind no longer changes it. That says nothing about text of another kind:
`scales.saturation` on held-out text does.
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
    """How one scale moved.

    Attributes:
        settled_after: Sequences after which the scale stayed within the tolerance of its final value; None: it has
            not settled.
        change: Largest distance from the final scale over the window at the end, relative to the final scale; inf
            where nothing was seen.
    """

    settled_after: int | None
    change: float

    @property
    def settled(self) -> bool:
        """Whether the scale has stopped moving."""
        return self.settled_after is not None


@dataclass(frozen=True)
class ConvergenceReport:
    """How all scales of a model moved.

    Attributes:
        scales: By the name of the scale in a checkpoint: ``....down_proj.input_scale``, ``....self_attn.k_scale``.
        sequences: Number of sequences seen.
        tolerance: Relative.
        window: In sequences.
    """

    scales: Mapping[str, Convergence]
    sequences: int
    tolerance: float
    window: int

    @property
    def unsettled(self) -> tuple[str, ...]:
        """The scales that have not settled, the most restless first."""
        found = [(name, one.change) for name, one in self.scales.items() if not one.settled]
        return tuple(name for name, _ in sorted(found, key=lambda pair: -pair[1]))


def trajectory(amax: Floats, rule: Rule = DEFAULT_RULE, element: ElementFormat = E4M3) -> Floats:
    """The scale after each sequence.

    Args:
        amax: float32 `[S]`, of the sequences that the module saw.
        rule: One of the history.
        element: Format of the quantized elements.

    Returns:
        float32 `[S]`; the last entry is the static scale.

    Raises:
        UsageError: A rule of the histogram, which is of all sequences at once.
    """
    if not isinstance(rule, HistoryRule):
        raise UsageError(f"rule {rule.name}: has no value per sequence; judge convergence by max")
    return to_scale(rule.running(amax), element)


def settled(
    trajectory: npt.NDArray[np.floating], tolerance: float = DEFAULT_TOLERANCE, window: int = DEFAULT_WINDOW
) -> bool:
    """Whether the scale stayed within `tolerance` of its final value, relative to it, over the last `window` sequences.

    With no more than `window` sequences it cannot be told, and the answer is no.
    """
    return _judge(trajectory, tolerance, window).settled


def report(
    stats: ActivationStats,
    rule: Rule = DEFAULT_RULE,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    window: int = DEFAULT_WINDOW,
) -> ConvergenceReport:
    """How the scales of a model moved over the sequences, in their order.

    A sequence that has no token for a module leaves its scale where it was.

    Raises:
        UsageError: A rule of the histogram.
    """
    judged = {
        f"{name}.input_scale": _judge(_held(trajectory(module.amax[seen], rule), seen), tolerance, window)
        for name, module in stats.inputs.items()
        for seen in (module.tokens > 0,)
    }
    for name, one in stats.kv.items():
        for scale, amax in (("k_scale", one.k_amax), ("v_scale", one.v_amax)):
            judged[f"{name}.{scale}"] = _judge(trajectory(amax.max(axis=1), rule), tolerance, window)
    return ConvergenceReport(judged, stats.sequences, tolerance, window)


def _judge(trajectory: npt.NDArray[np.floating], tolerance: float, window: int) -> Convergence:
    if not trajectory.size or trajectory[-1] == 0:
        return Convergence(None, math.inf)
    distance = np.abs(trajectory / trajectory[-1].astype(np.float64) - 1.0)
    change = float(distance[-window - 1 :].max())
    if len(trajectory) <= window or change > tolerance:
        return Convergence(None, change)
    outside = np.flatnonzero(distance > tolerance)
    return Convergence(int(outside[-1]) + 2 if outside.size else 1, change)


def _held(trajectory: Floats, seen: npt.NDArray[np.bool_]) -> Floats:
    """A trajectory over all sequences: unchanged by those that were not seen, 0 before the first that was."""
    steps = np.concatenate([np.zeros(1, np.float32), trajectory])
    held: Floats = steps[np.cumsum(seen)]
    return held
