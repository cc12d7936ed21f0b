"""Attribution: which modules of a quantized model make it differ from its baseline, and which to keep in 16 bits.

The signal-to-quantization-noise ratio (SQNR) of a module's output says how well it is quantized, but not how the model
amplifies the error. So modules are also exchanged between the models one at a time, the worst are taken out of the
candidate, and a search finds a mixture of both models that is within the tolerance. All of this uses a sample of the
text, within a time budget; the mixture that is found is then judged on all texts, like a candidate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.checkpoint.progress import Progress
from minifloat.evaluate.compare.attribution.damage import Distance, Mixtures, TimeBudget, as_tensor, measure_damage
from minifloat.evaluate.compare.attribution.differences import Difference, find_differences, stored_bytes
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.result import Attribution, ModuleDamage, Suggestion
from minifloat.evaluate.compare.transformers_model import TransformersModel, match_experts_implementation
from minifloat.evaluate.compare.verdict import Verdict
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import Role
from minifloat.model.architecture.roles import is_matrix, role_of, serving_group
from minifloat.model.plan.overrides import Override, override_patterns
from minifloat.model.runtime.linear import QuantizedWeight
from minifloat.model.runtime.lm_head import LoadedLmHead
from minifloat.model.runtime.names import assign

#: Fractions of the time at which measuring modules alone, and models without one module, ends; the rest is for the
#: suggestion.
_ALONE_ENDS, _WITHOUT_ENDS = 0.4, 0.6
#: Passes of the search, beside those of doubling and bisection, for which the size of its sample leaves time.
_PRUNING_PASSES = 8


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
    # Modules are exchanged in place and put back, also after an interrupt. Where the candidate runs with a quantized KV
    # cache, `ModuleDamage.kl_alone` is measured without the cache and everything else with it.
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


@dataclass(frozen=True)
class ModuleGroup:
    differences: tuple[Difference, ...]
    modules: tuple[str, ...]
    extra_bytes: int
    damage: float

    @property
    def worth(self) -> float:
        return self.damage / self.extra_bytes if self.extra_bytes > 0 else math.inf


@dataclass(frozen=True)
class KeepableGroups:
    groups: tuple[ModuleGroup, ...]
    names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        baseline: TransformersModel,
        candidate: TransformersModel,
        damage: Mapping[Difference, float],
        extra_bytes: Mapping[Difference, int],
    ) -> KeepableGroups:
        """Group the differences that an override of `quantize` would remove."""
        checkpoint = baseline.headers()
        if checkpoint.quantization_config is not None:
            return cls((), ())
        infos, family = dict(checkpoint.tensors), family_of(checkpoint.config)
        assignments, _ = assign(baseline.model, infos)
        sources = {assignment.target: assignment.sources for assignment in assignments}
        grouped: dict[str, list[tuple[Difference, tuple[str, ...]]]] = defaultdict(list)
        for difference in damage:
            location = difference.locations[0].name
            names = tuple(map(_module, sources.get(location) or sources.get(f"{location}.weight") or ()))
            if names and difference.is_quantization(baseline.model, candidate.model):
                grouped[serving_group(names[0], family)].append((difference, names))
        groups = [
            ModuleGroup(
                tuple(difference for difference, _ in members),
                tuple(name for _, names in members for name in names),
                sum(extra_bytes[difference] for difference, _ in members),
                sum(damage[difference] for difference, _ in members),
            )
            for members in grouped.values()
        ]
        matrices = [name for name, info in infos.items() if is_matrix(info) or role_of(info, family) is Role.EXPERTS]
        return cls(tuple(sorted(groups, key=lambda group: -group.worth)), tuple(map(_module, matrices)))


def suggest(
    keepable: KeepableGroups,
    mixtures: Mixtures,
    tolerance: Tolerance,
    budget: TimeBudget,
    confirm: Callable[[TransformersModel], Verdict] | None = None,
) -> Suggestion | None:
    # Modules are ranked by their damage per extra byte. Doubling and then bisection find how many from the top are
    # enough; each step measures the mixture itself, because the damages of modules do not add up.
    budget.report("the candidate on the sample")
    before = mixtures.measure(())
    if before.within(tolerance):
        return None
    search = _Search(mixtures, tolerance, budget)
    kept, after = search.prefix(keepable.groups)
    if after.within(tolerance):
        kept, after = search.pruned(kept, after)
    modules = tuple(name for group in kept for name in group.modules)
    everything = not mixtures.keeps_quantized(_differences(kept))
    verdict = None
    if confirm is not None and after.within(tolerance) and not everything:
        with mixtures.mixture(_differences(kept)) as mixture:
            verdict = confirm(mixture)
    return Suggestion(
        overrides=tuple(str(Override(pattern, None)) for pattern in override_patterns(modules, keepable.names)),
        modules=modules,
        extra_bytes=sum(group.extra_bytes for group in kept),
        kl_before=before.kl,
        kl_after=after.kl,
        ppl_increase_before=before.ppl_increase,
        ppl_increase_after=after.ppl_increase,
        same_top1_before=before.same_top1,
        same_top1_after=after.same_top1,
        reaches=after.within(tolerance),
        everything=everything,
        tokens=mixtures.tokens,
        finished=search.finished,
        verdict=verdict,
    )


class _Search:
    """Measures choices of groups until one is within the tolerance or the time is up."""

    def __init__(self, mixtures: Mixtures, tolerance: Tolerance, budget: TimeBudget) -> None:
        self._mixtures, self._tolerance, self._budget = mixtures, tolerance, budget
        self.finished = True

    def prefix(self, ranked: Sequence[ModuleGroup]) -> tuple[list[ModuleGroup], Distance]:
        """Return the shortest prefix of the ranking that is within the tolerance; all groups if none is."""
        low, high = 0, 1
        reached = self._measure(ranked[:high])
        while not reached.within(self._tolerance) and high < len(ranked) and self._has_time():
            low, high = high, min(2 * high, len(ranked))
            reached = self._measure(ranked[:high])
        while reached.within(self._tolerance) and high - low > 1 and self._has_time():
            middle = (low + high) // 2
            distance = self._measure(ranked[:middle])
            if distance.within(self._tolerance):
                high, reached = middle, distance
            else:
                low = middle
        return list(ranked[:high]), reached

    def pruned(self, kept: list[ModuleGroup], reached: Distance) -> tuple[list[ModuleGroup], Distance]:
        """Drop groups that are unnecessary, trying the most expensive first."""
        for group in sorted(kept[:-1], key=lambda group: -group.extra_bytes):
            if not self._budget.until():
                break
            fewer = [other for other in kept if other is not group]
            distance = self._measure(fewer)
            if distance.within(self._tolerance):
                kept, reached = fewer, distance
        return kept, reached

    def _has_time(self) -> bool:
        self.finished = self.finished and self._budget.until() > 0
        return self.finished

    def _measure(self, groups: Sequence[ModuleGroup]) -> Distance:
        self._budget.report(f"a suggestion of {sum(len(group.modules) for group in groups)} modules")
        return self._mixtures.measure(_differences(groups))


def _differences(groups: Sequence[ModuleGroup]) -> list[Difference]:
    return [difference for group in groups for difference in group.differences]


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")
