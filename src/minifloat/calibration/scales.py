"""Static scales: from activation statistics to the numbers that a checkpoint carries.

A static scale that is wrong fails in silence, so a module gets one only from what was seen of it. The one exception,
an expert that was routed too few tokens, takes the largest amax among the experts of its layer, and that is reported.
What the scales would have done to held-out text is measured by `saturation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from minifloat.architecture.groups import expert_group, fused_group
from minifloat.calibration.rules import DEFAULT_RULE, HistoryRule, Rule, histogram_of, to_scale
from minifloat.calibration.stats import ActivationStats, ModuleStats
from minifloat.errors import NotCalibratedError, UsageError
from minifloat.numerics.formats import E4M3, ElementFormat
from minifloat.numerics.histogram import Floats, bin_edges

#: An expert that saw fewer tokens than this takes the largest amax among the experts of its layer.
DEFAULT_MIN_TOKENS = 64

_Stats = TypeVar("_Stats")


@dataclass(frozen=True)
class StaticScales:
    """The scales of the inputs of a model's linears.

    Attributes:
        scales: By module: what multiplies to dequantize its input; float32, above 0, finite. Linears that a server
            fuses have the same.
        amax: By module: the magnitude that the format's largest value stands for.
        fallbacks: By module: why its scale comes from others.
    """

    scales: Mapping[str, np.float32]
    amax: Mapping[str, float]
    fallbacks: Mapping[str, str]


class KVScales(NamedTuple):
    """The scales of one attention's cache: float32, `()` or `[num_kv_heads]`."""

    k: Floats
    v: Floats


class Saturation(NamedTuple):
    """What a scale did to a tensor, as fractions of its elements, 0..1."""

    saturated: float
    flushed: float


def activation_scales(
    stats: ActivationStats,
    rule: Rule = DEFAULT_RULE,
    *,
    modules: Iterable[str] | None = None,
    min_tokens: int = DEFAULT_MIN_TOKENS,
    element: ElementFormat = E4M3,
) -> StaticScales:
    """One scale for the input of every module.

    Args:
        stats: What calibration saw.
        rule: Statistics to amax.
        modules: Names in the checkpoint; None: all in `stats`.
        min_tokens: An expert that saw fewer takes the largest amax among its layer's experts, for the same projection.
        element: Format of the quantized inputs.

    Raises:
        NotCalibratedError: Modules that were not watched, that no token reached, or that saw nothing but zeros.
        UsageError: The rule needs histograms and there are none.
    """
    wanted = _watched(stats.inputs, modules)
    amax = {name: rule.amax(module, element) for name, module in wanted.items()}
    starved = {
        name: module.total_tokens
        for name, module in wanted.items()
        if expert_group(name) and module.total_tokens < min_tokens
    }
    largest = _largest(amax, {name: _expert_projection(name) for name in amax})
    amax |= {name: largest[_expert_projection(name)] for name in starved}
    _require_seen(amax, wanted)
    shared = _largest(amax, {name: fused_group(name) for name in amax})
    amax = {name: shared[fused_group(name)] for name in amax}
    fallbacks = {
        name: f"saw {tokens} tokens, fewer than {min_tokens}: takes the largest amax among the experts of its layer"
        for name, tokens in starved.items()
    }
    return StaticScales({name: np.float32(to_scale(value, element)) for name, value in amax.items()}, amax, fallbacks)


def kv_scales(
    stats: ActivationStats,
    rule: Rule = DEFAULT_RULE,
    *,
    modules: Iterable[str] | None = None,
    per_head: bool = False,
    element: ElementFormat = E4M3,
) -> dict[str, KVScales]:
    """The scales of K and V of every attention.

    Args:
        stats: What calibration saw.
        rule: One of the history: caches have no histograms.
        modules: Names of attention modules in the checkpoint; None: all in `stats`.
        per_head: One scale per KV head; a head that held only zeros takes the largest of its tensor.
        element: Format of the cache.

    Raises:
        NotCalibratedError: Attentions that were not watched, or whose K or V held nothing but zeros.
        UsageError: The rule needs histograms.
    """
    if not isinstance(rule, HistoryRule):
        raise UsageError(f"rule {rule.name}: K and V have no histograms; take one of the amax history, such as max")
    wanted = _watched(stats.kv, modules)
    silent = [name for name, one in wanted.items() if not (one.k_amax.any() and one.v_amax.any())]
    if silent:
        raise NotCalibratedError(silent, "calibration saw no K or V but zeros; calibrate on text that reaches them")

    def scale(amax: Floats) -> Floats:
        if not per_head:
            return to_scale(rule.running(amax.max(axis=1))[-1], element)
        heads = rule.running(amax)[-1]
        return to_scale(np.where(heads > 0, heads, heads.max()), element)

    return {name: KVScales(scale(one.k_amax), scale(one.v_amax)) for name, one in wanted.items()}


def saturation(module: ModuleStats, scale: float, element: ElementFormat = E4M3) -> Saturation:
    """How much of a tensor saturates, and how much becomes zero, when it is quantized with `scale`.

    Saturated are elements that lose more than rounding would cost: beyond the largest value and half a step. Flushed
    are elements that are not zero and become it: up to half the smallest subnormal. A bin that a bound cuts counts
    whole, so neither is ever too low; where the amax is within the bound, nothing has saturated.

    Args:
        module: With a histogram, of text that the scale was not made from.
        scale: Multiplies to dequantize.
        element: Format of the quantized elements.

    Raises:
        UsageError: No histogram was observed.
    """
    histogram = histogram_of(module, "saturation")
    total = int(histogram.sum())
    if not total:
        return Saturation(0.0, 0.0)
    edges = bin_edges()
    half_step = 2.0 ** (element.emax - element.mantissa_bits - 1)
    bound = (element.max + half_step) * scale
    saturated = histogram[edges[1:] > bound].sum() if module.max > bound else 0
    flushed = histogram[1:][edges[1:-1] <= element.min_positive / 2 * scale].sum()
    return Saturation(float(saturated / total), float(flushed / total))


def _watched(found: Mapping[str, _Stats], modules: Iterable[str] | None) -> dict[str, _Stats]:
    """The statistics of these modules."""
    names = list(found if modules is None else modules)
    missing = [name for name in names if name not in found]
    if missing:
        raise NotCalibratedError(missing, "not in the activation statistics; calibrate this model, with these modules")
    return {name: found[name] for name in names}


def _require_seen(amax: Mapping[str, float], wanted: Mapping[str, ModuleStats]) -> None:
    """Raise unless every module has an amax above 0."""
    unreached = [name for name in amax if not wanted[name].total_tokens and not amax[name]]
    if unreached:
        raise NotCalibratedError(
            unreached, "calibration sent no token through it; calibrate on other or more text, or leave it unquantized"
        )
    silent = [name for name, value in amax.items() if not value]
    if silent:
        raise NotCalibratedError(
            silent, "its input was zero in all of the calibration; use other text, or leave it unquantized"
        )


def _expert_projection(module: str) -> str:
    """What the same projection of all experts of a layer has in common; the module's own name where it is no expert."""
    group = expert_group(module)
    return f"{group}.{module.rpartition('.')[2]}" if group else module


def _largest(amax: Mapping[str, float], groups: Mapping[str, str]) -> dict[str, float]:
    """The largest amax in each group."""
    largest: dict[str, float] = {}
    for name, value in amax.items():
        largest[groups[name]] = max(value, largest.get(groups[name], 0.0))
    return largest
