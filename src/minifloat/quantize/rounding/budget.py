"""`round_within_budget`: choose a format for each group of weights by measured damage, and round in this mixture.

The damage of nearest codes says how groups and formats compare. How much less a method loses is known once a model is
rounded: a bound on the KL divergence begins with the cheapest format.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.model.plan.overrides import KEEP
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.numerics.scheme import Scheme
from minifloat.quantize.estimate import Search, Work, visited_share
from minifloat.quantize.options import Budget
from minifloat.quantize.rounding.budget_formats import Formats, Group, Groups
from minifloat.quantize.rounding.group_damage import DAMAGE_TOKENS, Change, DamageRequest, Damages
from minifloat.quantize.rounding.methods import RoundingOptions
from minifloat.quantize.rounding.output_moments import OutputMoments
from minifloat.quantize.rounding.rounded_model import RoundedModel
from minifloat.quantize.rounding.run import measure_damage, round_checkpoint
from minifloat.quantize.rounding.texts import SplitText

#: Largest number of units of the table.
_LARGEST_TABLE = 1 << 16


class Frontier:
    """The choices with the least damage."""

    def __init__(self, costs: Sequence[Sequence[int]], damages: Sequence[Sequence[float]]) -> None:
        self._lowest = [min(of_group) for of_group in costs]
        extra = [[cost - low for cost in of_group] for of_group, low in zip(costs, self._lowest, strict=True)]
        total = sum(max(of_group) for of_group in extra)
        unit = math.gcd(*(cost for of_group in extra for cost in of_group)) or 1
        self.unit = max(unit, -(-total // _LARGEST_TABLE))
        self._costs, self._damages = costs, damages
        self._units = [[-(-cost // self.unit) for cost in of_group] for of_group in extra]
        size = sum(max(of_group) for of_group in self._units) + 1
        self._least: npt.NDArray[np.float64] = np.zeros(size)
        self._choices: list[npt.NDArray[np.uint8]] = []
        for units, damage in zip(self._units, damages, strict=True):
            self._add(units, damage)

    def _add(self, units: Sequence[int], damages: Sequence[float]) -> None:
        """Add a group: for every cost take the option that gives the least damage with the groups before it."""
        best = np.full(len(self._least), np.inf)
        choice = np.zeros(len(self._least), np.uint8)
        for option in sorted(range(len(units)), key=lambda index: units[index]):
            candidate = np.full(len(best), np.inf)
            candidate[units[option] :] = self._least[: len(best) - units[option]] + damages[option]
            better = candidate < best
            best[better], choice[better] = candidate[better], option
        self._least = best
        self._choices.append(choice)

    @property
    def cheapest(self) -> int:
        return sum(self._lowest)

    def within(self, cost: int) -> list[int] | None:
        """Return the option of each group with the least damage at no more than `cost` bytes; None: all cost more."""
        if cost < self.cheapest:
            return None
        return self._choice(min((cost - self.cheapest) // self.unit, len(self._least) - 1))

    def reaching(self, damage: float) -> list[int] | None:
        """Return the cheapest choice with no more than `damage`; None: there is none."""
        reached = np.flatnonzero(self._least <= damage)
        return self._choice(int(reached[0])) if len(reached) else None

    def points(self, count: int = 200) -> list[tuple[int, float]]:
        """Return about `count` costs in bytes, spread evenly, and the least damage at each of them."""
        steps = sorted({round(step) for step in np.linspace(0, len(self._least) - 1, min(count, len(self._least)))})
        return [(self.cheapest + step * self.unit, float(self._least[step])) for step in steps]

    def cost(self, choice: Sequence[int]) -> int:
        return sum(costs[option] for costs, option in zip(self._costs, choice, strict=True))

    def damage(self, choice: Sequence[int]) -> float:
        return sum(damages[option] for damages, option in zip(self._damages, choice, strict=True))

    def _choice(self, at: int) -> list[int]:
        chosen: list[int] = []
        for units, choices in zip(reversed(self._units), reversed(self._choices), strict=True):
            option = int(choices[at])
            chosen.append(option)
            at -= units[option]
        return chosen[::-1]


#: Runs in a mixture of formats before the closest one is taken.
_ATTEMPTS = 3
#: Part of a bound on the KL divergence that the next attempt aims at.
_MARGIN = 0.95


@dataclass(frozen=True)
class MeasuredMixture:
    """A mixture of formats in which the model was rounded."""

    bits: float
    kl: float  # KL divergence on held-out text, in nats per token
    predicted: float


@dataclass(frozen=True)
class WithinBudget:
    """A model that was rounded within a budget."""

    plan: QuantizationPlan
    model: RoundedModel
    budget: Budget
    formats: Formats
    chosen: tuple[Scheme | None, ...]  # the format of each group; None: kept as it is
    damages: Sequence[Sequence[float]]  # for each group the damage of each of its options, in nats per token
    frontier: tuple[tuple[float, float], ...]
    measured: tuple[MeasuredMixture, ...]
    result: MeasuredMixture  # that of the model

    @property
    def reached(self) -> bool:
        return self.budget.max_kl is None or self.result.kl <= self.budget.max_kl

    def counts(self) -> dict[str, int]:
        """Return the number of groups by format, the most frequent first."""
        names = [_name(scheme) for scheme in self.chosen]
        return {name: names.count(name) for name in sorted(set(names), key=lambda name: (-names.count(name), name))}

    def notes(self) -> tuple[str, ...]:
        counts = ", ".join(f"{name} for {count}" for name, count in self.counts().items())
        result, notes = self.result, []
        others = ""
        if len(self.measured) > 1:
            first = f"{self.measured[0].kl:.4f} with {self.formats.scheme.name} alone"
            others = f", {result.predicted:.4f} predicted, {first}"
        notes.append(
            f"Budget of {self.budget}: {result.bits:.3f} bits per weight, {counts} of {len(self.chosen)} groups of "
            f"weights; KL {result.kl:.4f} nats{others}. The mixture was chosen from formats that load in "
            f"{', '.join(self.formats.engines)}."
        )
        if not self.reached:
            notes.append(
                f"WARNING: {self.budget} was not reached in {len(self.measured)} runs; {result.kl:.4f} nats at "
                f"{result.bits:.3f} bits per weight is the nearest."
            )
        return tuple(notes)

    def to_dict(self) -> dict[str, Any]:
        """Return the budget, the choice and the measurements as JSON values."""
        return {
            **self.budget.to_dict(),
            "bits_per_weight": self.result.bits,
            "reached": self.reached,
            "engines": list(self.formats.engines),
            "refused_formats": list(self.formats.refused),
            "tokens": DAMAGE_TOKENS,
            "measured": [vars(mixture) for mixture in self.measured],
            "frontier": [list(point) for point in self.frontier],
            "groups": [
                {
                    "group": group.name,
                    "format": _name(scheme),
                    "damage": {
                        _name(option.scheme): damage for option, damage in zip(group.options, damages, strict=True)
                    },
                }
                for group, scheme, damages in zip(self.formats.groups.groups, self.chosen, self.damages, strict=True)
            ],
        }


@contextmanager
def round_within_budget(
    checkpoint: Checkpoint,
    budget: Budget,
    formats: Formats,
    texts: SplitText,
    options: RoundingOptions,
    work_dir: Path,
    progress: Progress | None = None,
) -> Iterator[WithinBudget]:
    """Round a model in the mixture of formats with the least damage within a budget."""
    with ExitStack() as stack:
        moments = stack.enter_context(OutputMoments(work_dir))
        report = None if progress is None else partial(_report, progress, "measuring damage")
        damages = measure_damage(checkpoint, _request(formats), texts, options, moments, report)
        if not any(damage > 0 for of_group in damages.values() for damage in of_group.values()):
            raise UsageError(
                f"{budget}: no group of weights has a damage, because the gradients of the model are zero or not "
                "finite; choose formats by hand (--override)"
            )
        search, attempts = _Search(budget, formats.groups, damages), list[_Attempt]()
        while len(attempts) <= _ATTEMPTS and (choice := search.choose()) is not None:
            if choice in search.choices[-1:]:
                break
            plan = formats.plan(search.schemes(choice))
            folder = work_dir.with_name(f"{work_dir.name}-{len(attempts)}")
            report = None if progress is None else partial(_report, progress, f"mixture {len(attempts) + 1}")
            rounding = round_checkpoint(checkpoint, plan, texts, options, folder, report, moments)
            attempts.append(_Attempt(plan, stack.enter_context(rounding)))
            search.add(choice, attempts[-1].model.choosing["method"])
        best = search.best()
        yield WithinBudget(
            attempts[best].plan,
            attempts[best].model,
            budget,
            replace(formats, groups=search.groups),
            search.schemes(search.choices[best]),
            search.scaled_damages(),
            search.curve(),
            tuple(search.measured),
            search.measured[best],
        )


def _request(formats: Formats) -> DamageRequest:
    """Return the damages to measure: of each group in each of its formats."""
    groups = formats.groups.groups
    changes = {
        scheme.name: Change(formats.plan([scheme if scheme in _schemes(group) else formats.scheme for group in groups]))
        for scheme in _schemes(*groups)
    }
    return DamageRequest({group.name: group.parts for group in groups}, changes)


def _schemes(*groups: Group) -> list[Scheme]:
    """Return the formats that some of the groups may have."""
    found = (option.scheme for group in groups for option in group.options)
    return list(dict.fromkeys(scheme for scheme in found if scheme is not None))


@dataclass(frozen=True)
class _Attempt:
    plan: QuantizationPlan
    model: RoundedModel


def _report(progress: Progress, run: str, done: int, total: int, what: str) -> None:
    progress(done, total, f"{run}: {what}")


def require_feasible(budget: Budget, groups: Groups) -> None:
    """Refuse a budget of bits or bytes that no mixture meets, or that quantizes nothing."""
    allowed = allowed_bytes(budget, groups)
    if allowed is None:
        return
    least = sum(group.options[0].nbytes for group in groups.groups)
    most = sum(group.options[-1].nbytes for group in groups.groups)
    if allowed < least:
        raise UsageError(f"{budget} cannot be met: the nearest that can is {_as_budget(budget, groups, least)}")
    if allowed >= most and all(group.options[-1].scheme is None for group in groups.groups):
        below = most - min(group.options[-1].nbytes - group.options[-2].nbytes for group in groups.groups)
        raise UsageError(
            f"{budget} leaves every weight as it is; the largest that quantizes one is "
            f"{_as_budget(budget, groups, below)}"
        )


def budget_search(formats: Formats, plan: QuantizationPlan, budget: Budget, config: Mapping[str, Any]) -> Search:
    """Return what it takes to choose a mixture, beside rounding in a plan once."""
    groups = formats.groups.groups
    shapes = {part.module: part.shape for tensor in plan.tensors for part in tensor.parts}
    weights, count = sum(map(math.prod, shapes.values())), len(_schemes(*groups))
    products = 2.0 * weights * DAMAGE_TOKENS * visited_share(config) * (count + 1)
    work = Work(forward=products, cast=float(weights) * count)
    return Search(
        f"the damage of {len(groups)} groups of weights is", work, 0, 0 if budget.max_kl is None else _ATTEMPTS
    )


def allowed_bytes(budget: Budget, groups: Groups) -> int | None:
    """Return the bytes that the groups may take; None: the budget bounds the KL divergence."""
    if budget.bits is not None:
        return math.floor(budget.bits * groups.counted_weights / 8) - groups.counted_bytes
    return None if budget.nbytes is None else budget.nbytes - groups.fixed_bytes


def _as_budget(budget: Budget, groups: Groups, group_bytes: int) -> str:
    """Return the budget of the same kind that just allows `group_bytes`."""
    if budget.bits is None:
        return f"{group_bytes + groups.fixed_bytes:,} bytes"
    return f"{math.ceil(groups.bits(group_bytes) * 1000) / 1000:g} bits per weight"


def _name(scheme: Scheme | None) -> str:
    return KEEP if scheme is None else scheme.name


class _Search:
    """The damages, and the choices that they lead to."""

    def __init__(self, budget: Budget, groups: Groups, damages: Damages) -> None:
        self.budget, self.groups = budget, _measurable(groups, damages)
        self.measured: list[MeasuredMixture] = []
        self.choices: list[Sequence[int]] = []
        self._damages = [
            [0.0 if o.scheme is None else damages.get(group.name, {}).get(o.scheme.name, 0.0) for o in group.options]
            for group in self.groups.groups
        ]
        costs = [[option.nbytes for option in group.options] for group in self.groups.groups]
        self._frontier = Frontier(costs, self._damages)
        self._scale = 1.0  # KL divergence that was measured last over the damage of nearest codes
        self._bound = math.inf  # of the damage of nearest codes

    def schemes(self, choice: Sequence[int]) -> tuple[Scheme | None, ...]:
        return tuple(group.options[option].scheme for group, option in zip(self.groups.groups, choice, strict=True))

    def add(self, choice: Sequence[int], kl: float) -> None:
        """Take what a mixture measured; the damages become those of the method, as far as the first one shows."""
        damage = self._frontier.damage(choice)
        scale = kl / damage if damage > 0 and kl > 0 else self._scale
        predicted = damage * (self._scale if self.measured else scale)
        self.choices.append(choice)
        self.measured.append(MeasuredMixture(self.groups.bits(self._frontier.cost(choice)), kl, predicted))
        self._scale = scale
        if self.budget.max_kl is not None:
            self._bound = min(self._bound, _MARGIN * self.budget.max_kl / scale)

    def best(self) -> int:
        """Return the number of the attempt that keeps the bound with fewest bits, or is nearest."""
        numbers, bound = range(len(self.measured)), self.budget.max_kl
        if bound is None:
            return numbers[-1]
        kept = [number for number in numbers if self.measured[number].kl <= bound]
        if kept:
            return min(kept, key=lambda number: self.measured[number].bits)
        return min(numbers, key=lambda number: self.measured[number].kl)

    def choose(self) -> list[int] | None:
        """Return the next choice; None: the last one stays."""
        if self.budget.max_kl is None:
            allowed = allowed_bytes(self.budget, self.groups)
            assert allowed is not None
            return None if self.measured else self._frontier.within(allowed)
        if not self.measured:
            return [0] * len(self.groups.groups)
        if self.measured[-1].kl <= self.budget.max_kl:
            return None
        choice = self._frontier.reaching(self._bound)
        if choice is None or not any(self.schemes(choice)):
            best = min(self.measured, key=lambda mixture: mixture.kl)
            raise UsageError(
                f"{self.budget} cannot be met unless every weight stays as it is; {best.kl:.4f} nats at "
                f"{best.bits:.3f} bits per weight is the nearest that was measured"
            )
        return choice

    def scaled_damages(self) -> list[list[float]]:
        """Return for each group the damage of each option, as far as the last measurement shows."""
        return [[self._scale * damage for damage in of_group] for of_group in self._damages]

    def curve(self) -> tuple[tuple[float, float], ...]:
        """Return bits per weight, and the least KL divergence that the damages predict."""
        return tuple((self.groups.bits(cost), self._scale * damage) for cost, damage in self._frontier.points())


def _measurable(groups: Groups, damages: Damages) -> Groups:
    """Return the groups, of which those without a measurement keep the cheapest format."""

    def limited(group: Group) -> Group:
        return group if group.name in damages else replace(group, options=group.options[:1])

    return replace(groups, groups=tuple(map(limited, groups.groups)))


def budget_chart(result: WithinBudget) -> str:
    """Return the chart of KL divergence against bits per weight, as predicted and as measured, as an SVG file."""
    from minifloat.report.document import Axis, Figure, Lines, Series
    from minifloat.report.figures import draw

    points = sorted((mixture.bits, mixture.kl) for mixture in result.measured)
    series = [Series("least that the damages of groups predict", result.frontier), Series("measured", points)]
    chart = Lines(series, Axis("bits per weight"), Axis("KL divergence, nats per token", log=True))
    return draw(Figure("KL divergence from the original model on held-out text, by bits per weight", chart), alone=True)
