"""Static scales: from activation statistics to the numbers that a checkpoint stores.

A wrong static scale makes a model worse without any error, so each module gets a scale only from its own statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from minifloat.calibration.rules import DEFAULT_RULE, Rule, to_scale
from minifloat.calibration.stats import ActivationStats, ModuleStats
from minifloat.errors import NotCalibratedError
from minifloat.model.architecture.roles import expert_group, fused_group
from minifloat.numerics.formats import E4M3, ElementFormat
from minifloat.numerics.histogram import Floats, bin_edges

#: An expert that fewer tokens reached takes the largest amax among the experts of its layer.
DEFAULT_MIN_TOKENS = 64

_Stats = TypeVar("_Stats")


@dataclass(frozen=True)
class StaticScales:
    """The scales of the inputs of a model's linears."""

    scales: Mapping[str, np.float32]
    amax: Mapping[str, float]
    fallbacks: Mapping[str, str]


class KVScales(NamedTuple):
    """The scales of one attention's cache, float32 `()`."""

    k: Floats
    v: Floats


class Saturation(NamedTuple):
    """Effect of a scale on a tensor: the fractions of its elements, 0..1, that saturate and that become zero."""

    saturated: float
    flushed: float


def activation_scales(
    stats: ActivationStats,
    rule: Rule = DEFAULT_RULE,
    *,
    modules: Iterable[str] | None = None,
    group_of: Callable[[str], str] = fused_group,
) -> StaticScales:
    """Return one scale for the input of each module."""
    selected = _select(stats.inputs, modules)
    amax = {name: rule.amax(module) for name, module in selected.items()}
    starved = {
        name: module.total_tokens
        for name, module in selected.items()
        if expert_group(name) and module.total_tokens < DEFAULT_MIN_TOKENS
    }
    largest = _largest(amax, {name: _expert_projection(name) for name in amax})
    amax |= {name: largest[_expert_projection(name)] for name in starved}
    _require_nonzero(amax, selected)
    shared = _largest(amax, {name: group_of(name) for name in amax})
    amax = {name: shared[group_of(name)] for name in amax}
    few = f"fewer than {DEFAULT_MIN_TOKENS}: takes the largest amax among the experts of its layer"
    fallbacks = {name: f"saw {tokens} tokens, {few}" for name, tokens in starved.items()}
    return StaticScales({name: np.float32(to_scale(value)) for name, value in amax.items()}, amax, fallbacks)


def kv_scales(stats: ActivationStats, *, modules: Iterable[str] | None = None) -> dict[str, KVScales]:
    """Return the scales of K and V of each attention, by the rule `max`: they have no histograms."""
    selected = _select(stats.kv, modules)
    all_zero = [name for name, kv in selected.items() if not (kv.k_amax.any() and kv.v_amax.any())]
    if all_zero:
        raise NotCalibratedError(all_zero, "calibration saw no K or V but zeros; calibrate on text that reaches them")
    return {name: KVScales(to_scale(kv.k_amax.max()), to_scale(kv.v_amax.max())) for name, kv in selected.items()}


def saturation(module: ModuleStats, scale: float, element: ElementFormat = E4M3) -> Saturation:
    """Return how much of a tensor saturates, and how much becomes zero, when it is quantized with `scale`."""
    histogram = module.require_histogram("saturation")
    total = int(histogram.sum())
    if not total:
        return Saturation(0.0, 0.0)
    # A bin that holds a bound counts as a whole, so that neither fraction is ever too low.
    edges = bin_edges()
    half_step = 2.0 ** (element.emax - element.mantissa_bits - 1)
    bound = (element.max + half_step) * scale
    saturated = histogram[edges[1:] > bound].sum() if module.max > bound else 0
    flushed = histogram[1:][edges[1:-1] <= element.min_positive / 2 * scale].sum()
    return Saturation(float(saturated / total), float(flushed / total))


def _select(by_module: Mapping[str, _Stats], modules: Iterable[str] | None) -> dict[str, _Stats]:
    names = list(by_module if modules is None else modules)
    missing = [name for name in names if name not in by_module]
    if missing:
        raise NotCalibratedError(missing, "not in the activation statistics; calibrate this model, with these modules")
    return {name: by_module[name] for name in names}


def _require_nonzero(amax: Mapping[str, float], stats: Mapping[str, ModuleStats]) -> None:
    """Raise an error unless every module has an amax above 0."""
    unreached = [name for name in amax if not stats[name].total_tokens and not amax[name]]
    if unreached:
        raise NotCalibratedError(
            unreached, "calibration sent no token through it; calibrate on other or more text, or leave it unquantized"
        )
    all_zero = [name for name, value in amax.items() if not value]
    if all_zero:
        raise NotCalibratedError(
            all_zero, "its input was zero in all of the calibration; use other text, or leave it unquantized"
        )


def _expert_projection(module: str) -> str:
    """Return a name for the same projection of all experts of a layer; for any other module, its own name."""
    group = expert_group(module)
    return f"{group}.{module.rpartition('.')[2]}" if group else module


def _largest(amax: Mapping[str, float], groups: Mapping[str, str]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for name, value in amax.items():
        largest[groups[name]] = max(value, largest.get(groups[name], 0.0))
    return largest


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


def trajectory(amax: Floats) -> Floats:
    """Return the scale by the rule `max` after each sequence."""
    return to_scale(np.maximum.accumulate(amax))


def convergence_report(
    stats: ActivationStats,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    window: int = DEFAULT_WINDOW,
) -> ConvergenceReport:
    """Return how the scales of a model by the rule `max` moved over the sequences, in order."""
    scales = {}
    for name, module in stats.inputs.items():
        reached = module.tokens > 0
        moving = _over_all_sequences(trajectory(module.amax[reached]), reached)
        scales[f"{name}.input_scale"] = _convergence(moving, tolerance, window)
    for name, kv in stats.kv.items():
        for scale, amax in (("k_scale", kv.k_amax), ("v_scale", kv.v_amax)):
            scales[f"{name}.{scale}"] = _convergence(trajectory(amax.max(axis=1)), tolerance, window)
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
