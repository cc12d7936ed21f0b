"""Which modules to keep in 16 bits so that a quantized model is the same model again, for the fewest extra bytes.

Modules are ranked by the damage that they do per byte that keeping them costs. How many of that ranking are enough is
found by bisection, each step measuring the mixture as it would be, because damages of modules do not add up; then those
that turn out not to be needed are given back. What servers run as one (q/k/v, gate/up, all experts of a layer) is kept
as one.

Left out: proof that no cheaper choice exists. There are too many to try.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minifloat.architecture.groups import expert_group, fused_group
from minifloat.architecture.roles import Role, is_matrix, role_of
from minifloat.checkpoint import Checkpoint
from minifloat.compare.attribution.budget import TimeBudget
from minifloat.compare.attribution.differences import Difference
from minifloat.compare.attribution.mixture import Distance, Mixtures
from minifloat.compare.attribution.overrides import override_patterns
from minifloat.compare.models import Predictor
from minifloat.compare.verdict import Tolerance
from minifloat.plan.quantization import Override
from minifloat.runtime.names import assign


@dataclass(frozen=True)
class Suggestion:
    """Modules to leave in the baseline's precision, and what the model is then, measured.

    Figures are of a sample of the text and have no interval.

    Attributes:
        overrides: As ``minifloat quantize --override`` takes them, ``"REGEX=bf16"``.
        modules: The modules that these match, by their names in the baseline's checkpoint.
        extra_bytes: What that costs.
        kl_before: Mean KL divergence of the candidate in nats per token.
        kl_after: The same with the suggestion.
        ppl_increase_before: Perplexity over the baseline's, less 1, of the candidate.
        ppl_increase_after: The same with the suggestion.
        agreement_before: Fraction of tokens at which the candidate's first choice is the baseline's, ties apart.
        agreement_after: The same with the suggestion.
        reaches: Whether the model is then within the tolerance.
        everything: Whether nothing would stay quantized; another scheme is the better answer then.
        tokens: Scored tokens of the sample.
    """

    overrides: tuple[str, ...]
    modules: tuple[str, ...]
    extra_bytes: int
    kl_before: float
    kl_after: float
    ppl_increase_before: float
    ppl_increase_after: float
    agreement_before: float
    agreement_after: float
    reaches: bool
    everything: bool
    tokens: int


@dataclass(frozen=True)
class ModuleGroup:
    """Modules that are kept together or not at all.

    Attributes:
        differences: In which the candidate would be as the baseline.
        modules: Their names in the baseline's checkpoint; one of the model may be many there.
        extra_bytes: What keeping them costs.
        damage: What they do: KL divergences of each alone, measured or expected, added up.
    """

    differences: tuple[Difference, ...]
    modules: tuple[str, ...]
    extra_bytes: int
    damage: float

    @property
    def worth(self) -> float:
        """Damage per byte."""
        return self.damage / self.extra_bytes if self.extra_bytes > 0 else math.inf


@dataclass(frozen=True)
class KeepableGroups:
    """What could be kept.

    Attributes:
        groups: The most worth first.
        names: All names of the baseline's checkpoint that overrides are searched in.
    """

    groups: tuple[ModuleGroup, ...]
    names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        baseline: Predictor,
        candidate: Predictor,
        damage: Mapping[Difference, float],
        extra_bytes: Mapping[Difference, int],
    ) -> KeepableGroups:
        """Those differences that `quantize` would not make if told so.

        Args:
            baseline: Its folder says how tensors are named; none can be kept if it is itself quantized.
            candidate: Its quantized weights are the choices.
            damage: Of all differences.
            extra_bytes: Of all differences.

        Raises:
            CheckpointError: The folder of the baseline cannot be read.
        """
        with Checkpoint.open(baseline.folder) as checkpoint:
            if checkpoint.quantization_config is not None:
                return cls((), ())
            infos = dict(checkpoint.tensors)
        assignments, _ = assign(baseline.model, infos)
        sources = {assignment.target: assignment.sources for assignment in assignments}
        grouped: dict[str, list[tuple[Difference, tuple[str, ...]]]] = defaultdict(list)
        for difference in damage:
            place = difference.places[0].name
            names = tuple(map(_module, sources.get(place) or sources.get(f"{place}.weight") or ()))
            if names and difference.is_quantization(baseline.model, candidate.model):
                grouped[expert_group(names[0]) or fused_group(names[0])].append((difference, names))
        groups = [
            ModuleGroup(
                tuple(difference for difference, _ in members),
                tuple(name for _, names in members for name in names),
                sum(extra_bytes[difference] for difference, _ in members),
                sum(damage[difference] for difference, _ in members),
            )
            for members in grouped.values()
        ]
        matrices = [name for name, info in infos.items() if is_matrix(info) or role_of(info) is Role.EXPERTS]
        return cls(tuple(sorted(groups, key=lambda group: -group.worth)), tuple(map(_module, matrices)))


def suggest(
    choices: KeepableGroups,
    mixtures: Mixtures,
    tolerance: Tolerance,
    budget: TimeBudget,
) -> Suggestion | None:
    """Find what to keep.

    Args:
        choices: At least one group.
        mixtures: Of the baseline and the candidate that is to be brought within the tolerance.
        tolerance: How far the model may be from the baseline.
        budget: When it is spent, the best that is known is taken.

    Returns:
        None if the candidate is within the tolerance as it is.
    """
    budget.tell("the candidate on the sample")
    before = mixtures.measure(())
    if before.within(tolerance):
        return None
    search = _Search(mixtures, tolerance, budget)
    kept, after = search.prefix(choices.groups)
    if after.within(tolerance):
        kept, after = search.pruned(kept, after)
    modules = tuple(name for group in kept for name in group.modules)
    return Suggestion(
        overrides=tuple(str(Override(pattern, None)) for pattern in override_patterns(modules, choices.names)),
        modules=modules,
        extra_bytes=sum(group.extra_bytes for group in kept),
        kl_before=before.kl,
        kl_after=after.kl,
        ppl_increase_before=before.ppl_increase,
        ppl_increase_after=after.ppl_increase,
        agreement_before=before.agreement,
        agreement_after=after.agreement,
        reaches=after.within(tolerance),
        everything=not mixtures.keeps_quantized(_differences(kept)),
        tokens=mixtures.tokens,
    )


class _Search:
    """Measures choices until one is good or the time is up."""

    def __init__(self, mixtures: Mixtures, tolerance: Tolerance, budget: TimeBudget) -> None:
        self._mixtures, self._tolerance, self._budget = mixtures, tolerance, budget

    def prefix(self, ranked: Sequence[ModuleGroup]) -> tuple[list[ModuleGroup], Distance]:
        """The fewest groups from the first that are enough; all if even those are not."""
        low, high = 0, len(ranked)
        reached = self._measure(ranked)
        while reached.within(self._tolerance) and high - low > 1 and self._budget.until():
            middle = (low + high) // 2
            found = self._measure(ranked[:middle])
            if found.within(self._tolerance):
                high, reached = middle, found
            else:
                low = middle
        return list(ranked[:high]), reached

    def pruned(self, kept: list[ModuleGroup], reached: Distance) -> tuple[list[ModuleGroup], Distance]:
        """Without groups that are not needed, the most expensive first.

        The last one is, or a shorter prefix would have been enough.
        """
        for group in sorted(kept[:-1], key=lambda group: -group.extra_bytes):
            if not self._budget.until():
                break
            fewer = [other for other in kept if other is not group]
            found = self._measure(fewer)
            if found.within(self._tolerance):
                kept, reached = fewer, found
        return kept, reached

    def _measure(self, groups: Sequence[ModuleGroup]) -> Distance:
        self._budget.tell(f"a suggestion of {sum(len(group.modules) for group in groups)} modules")
        return self._mixtures.measure(_differences(groups))


def _differences(groups: Sequence[ModuleGroup]) -> list[Difference]:
    return [difference for group in groups for difference in group.differences]


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")
