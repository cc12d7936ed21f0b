"""Suggestion of modules to keep in 16 bits, so that a quantized model is within the tolerance for few extra bytes.

Modules are ranked by their damage per extra byte of keeping them. Doubling and then bisection find how many modules
from the top of this ranking are enough, so that few modules need few steps; each step measures the mixture itself,
because the damages of modules do not add up. Modules that turn out to be unnecessary are then dropped. Modules that
servers fuse (q/k/v, gate/up, all experts of a layer) are kept or dropped together.

The search uses a sample of the text. What it finds is then measured on all texts, with intervals, and judged like a
candidate.

Left out: a proof that no cheaper choice exists. There are too many choices to try.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from minifloat.evaluate.compare.attribution.damage import Distance, Mixtures, TimeBudget
from minifloat.evaluate.compare.attribution.differences import Difference
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.transformers_model import TransformersModel
from minifloat.evaluate.compare.verdict import Verdict
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import Role
from minifloat.model.architecture.roles import is_matrix, role_of, serving_group
from minifloat.model.plan.overrides import Override, override_patterns
from minifloat.model.runtime.names import assign


@dataclass(frozen=True)
class Suggestion:
    """Modules to leave in the baseline's precision, and the measured effect."""

    overrides: tuple[str, ...]
    modules: tuple[str, ...]
    extra_bytes: int
    kl_before: float
    kl_after: float
    ppl_increase_before: float
    ppl_increase_after: float
    same_top1_before: float
    same_top1_after: float
    reaches: bool
    everything: bool
    tokens: int
    finished: bool = True
    verdict: Verdict | None = None


@dataclass(frozen=True)
class ModuleGroup:
    """Modules that are kept in 16 bits together or not at all."""

    differences: tuple[Difference, ...]
    modules: tuple[str, ...]
    extra_bytes: int
    damage: float

    @property
    def worth(self) -> float:
        return self.damage / self.extra_bytes if self.extra_bytes > 0 else math.inf


@dataclass(frozen=True)
class KeepableGroups:
    """The groups of modules that could be kept in 16 bits."""

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
