"""`attribute`: measure the damage of modules and suggest which to keep in 16 bits, within a time budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.checkpoint.progress import Progress
from minifloat.evaluate.compare.attribution.damage import Mixtures, TimeBudget, as_tensor, measure_damage
from minifloat.evaluate.compare.attribution.differences import Difference, find_differences, stored_bytes
from minifloat.evaluate.compare.attribution.suggestion import KeepableGroups, Suggestion, suggest
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.transformers_model import TransformersModel, match_experts_implementation
from minifloat.evaluate.compare.verdict import Verdict
from minifloat.model.runtime.linear import QuantizedWeight
from minifloat.model.runtime.lm_head import LoadedLmHead

#: Fractions of the time at which measuring modules alone, and models without one module, ends; the rest is for the
#: suggestion.
_ALONE_ENDS, _WITHOUT_ENDS = 0.4, 0.6
#: Passes of the search, beside those of doubling and bisection, for which the size of its sample leaves time.
_PRUNING_PASSES = 8


@dataclass(frozen=True)
class ModuleDamage:
    """The damage of one module."""

    module: str
    sqnr_db: float
    kl_alone: float | None
    kl_without: float | None
    extra_bytes: int


@dataclass(frozen=True)
class Attribution:
    """The result of `attribute`."""

    rows: tuple[ModuleDamage, ...]
    tokens: int
    seconds: float
    measured: int
    of: int
    suggestion: Suggestion | None


@torch.inference_mode()
def attribute(
    baseline: TransformersModel,
    candidate: TransformersModel,
    windows: Tensor | Sequence[Sequence[int]],
    tolerance: Tolerance,
    seconds: float,
    progress: Progress | None = None,
    confirm: Callable[[TransformersModel], Verdict] | None = None,
) -> Attribution:
    """Measure the damage of each module of the candidate, and suggest which modules to keep in 16 bits."""
    budget = TimeBudget(seconds, progress)
    match_experts_implementation([baseline, candidate])
    with baseline.set_up(), candidate.set_up():
        differences = find_differences(baseline.model, candidate.model)
    if not differences:
        budget.finish()
        return Attribution((), 0, budget.spent, 0, 0, None)
    windows = as_tensor(windows)
    measured = measure_damage(baseline, candidate, differences, windows, budget, _ALONE_ENDS)
    expected, alone = measured.expected, measured.alone
    ranked = sorted(differences, key=lambda d: _rank(alone.get(d), expected.noise(d)))
    without = _measure_without(measured.mixtures, [d for d in ranked if d in alone], budget)
    extra = _extra_bytes(baseline, candidate, differences)
    rows = tuple(ModuleDamage(d.name, expected.sqnr[d], alone.get(d), without.get(d), extra[d]) for d in ranked)
    damage = {difference: alone.get(difference, expected.damage(difference)) for difference in ranked}
    keepable = KeepableGroups.of(baseline, candidate, damage, extra)
    suggestion = None
    if keepable.groups and budget.until():
        passes = 2 * math.ceil(math.log2(len(keepable.groups) + 1)) + 1 + _PRUNING_PASSES
        sample = measured.sample(windows, budget.until() / passes)
        suggestion = suggest(keepable, Mixtures(baseline, candidate, sample), tolerance, budget, confirm)
    budget.finish()
    return Attribution(rows, measured.mixtures.tokens, budget.spent, len(alone), len(rows), suggestion)


def _measure_without(mixtures: Mixtures, ranked: Sequence[Difference], budget: TimeBudget) -> dict[Difference, float]:
    """Return the KL divergences of the candidate with single modules of the baseline, as many as the time allows."""
    without: dict[Difference, float] = {}
    for difference in ranked:
        if not budget.until(_WITHOUT_ENDS):
            break
        budget.report(f"without {difference.name}")
        without[difference] = mixtures.measure([difference]).kl
    return without


def _rank(kl: float | None, noise: float) -> tuple[bool, float]:
    """Return the sort key of a module: measured modules first, then by damage in descending order; NaN is the worst."""
    value = noise if kl is None else kl
    return kl is None, -math.inf if math.isnan(value) else -value


def _extra_bytes(
    baseline: TransformersModel, candidate: TransformersModel, differences: Sequence[Difference]
) -> dict[Difference, int]:
    """Return the bytes by which each module is larger in the baseline's checkpoint than in the candidate's."""
    model = baseline.model
    quantized = sum(module.nbytes for module in model.modules() if isinstance(module, QuantizedWeight))
    elements = sum(parameter.numel() for parameter in model.parameters())
    element_bytes = round((baseline.nbytes - quantized) / max(elements, 1))
    extra = {}
    for difference in differences:
        own, other = (difference.locations[0].get(predictor.model) for predictor in (baseline, candidate))
        same_file = isinstance(other, LoadedLmHead)
        extra[difference] = 0 if same_file else stored_bytes(own, element_bytes) - stored_bytes(other, element_bytes)
    return extra
