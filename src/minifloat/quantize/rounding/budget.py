"""`round_within_budget`: choose a format for each group of weights by measured damage, and round in this mixture.

The model is first rounded in the cheapest format.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.model.architecture.roles import text_config
from minifloat.model.plan.overrides import KEEP, Override
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.numerics.scheme import Scheme
from minifloat.quantize.estimate import Search
from minifloat.quantize.options import Budget
from minifloat.quantize.rounding.budget_formats import Formats, Group, Groups, mixture
from minifloat.quantize.rounding.damage import GroupsToMeasure, damage_tokens
from minifloat.quantize.rounding.methods import RoundingOptions
from minifloat.quantize.rounding.output_moments import OutputMoments
from minifloat.quantize.rounding.rounded_model import RoundedModel
from minifloat.quantize.rounding.run import round_checkpoint
from minifloat.quantize.rounding.texts import SplitText
from minifloat.report.text import size_text

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
        """Cost of the cheapest choice."""
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
    damages: tuple[tuple[float, ...], ...]  # for each group the damage of each of its options, in nats per token
    frontier: tuple[tuple[float, float], ...]
    measured: tuple[MeasuredMixture, ...]
    result: MeasuredMixture  # that of the model
    tokens: int

    @property
    def reached(self) -> bool:
        return self.budget.max_kl is None or self.result.kl <= self.budget.max_kl

    def counts(self) -> dict[str, int]:
        """Return the number of groups by format, the most frequent first."""
        names = [_name(scheme) for scheme in self.chosen]
        return {name: names.count(name) for name in sorted(set(names), key=lambda name: (-names.count(name), name))}

    def notes(self) -> tuple[str, ...]:
        """Return sentences for the user."""
        counts = ", ".join(f"{name} for {count}" for name, count in self.counts().items())
        result, notes = self.result, []
        notes.append(
            f"Budget of {self.budget}: {result.bits:.3f} bits per weight, {counts} of {len(self.chosen)} groups of "
            f"weights; KL {result.kl:.4f} nats, {result.predicted:.4f} predicted, {self.measured[0].kl:.4f} with "
            f"{self.formats.scheme.name} alone. The mixture was chosen from formats that load in "
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
            "tokens": self.tokens,
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
    groups, planner, user = formats.groups, formats.planner, formats.user
    request = GroupsToMeasure(
        {group.name: group.parts for group in groups.groups},
        list(dict.fromkeys(o.scheme for group in groups.groups for o in group.options if o.scheme is not None)),
        damage_tokens(len(groups.groups), groups.layers),
    )
    with ExitStack() as stack:
        moments = stack.enter_context(OutputMoments(work_dir))

        def rounded(plan: QuantizationPlan, run: int) -> RoundedModel:
            folder = work_dir.with_name(f"{work_dir.name}-{run}")
            report = None if progress is None else partial(_report, progress, run)
            measured = request if run == 0 else None
            return stack.enter_context(
                round_checkpoint(checkpoint, plan, texts, options, folder, report, measured, moments)
            )

        attempts = [_Attempt(planner(formats.scheme, user), rounded(planner(formats.scheme, user), 0))]
        search = _Search(budget, groups, attempts[0].model, formats.scheme)
        search.add(search.cheapest, attempts[0].model.choosing["method"])
        while len(attempts) <= _ATTEMPTS and (choice := search.choose()) is not None and choice != search.choices[-1]:
            plan = planner(*_recipe(groups, search.schemes(choice), user, formats.scheme))
            attempts.append(_Attempt(plan, rounded(plan, len(attempts))))
            search.add(choice, attempts[-1].model.choosing["method"])
        best = search.best()
        yield WithinBudget(
            attempts[best].plan,
            attempts[best].model,
            budget,
            replace(formats, groups=search.groups),
            search.schemes(search.choices[best]),
            search.damages,
            search.curve(),
            tuple(search.measured),
            search.measured[best],
            int(attempts[0].model.damage["tokens"]),
        )


@dataclass(frozen=True)
class _Attempt:
    plan: QuantizationPlan
    model: RoundedModel


def _report(progress: Progress, run: int, done: int, total: int, what: str) -> None:
    progress(done, total, f"{'measuring damage' if run == 0 else f'mixture {run}'}: {what}")


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


@dataclass(frozen=True)
class SearchCost:
    """What it takes to measure the damage of all groups."""

    groups: int
    tokens: int
    disk: int  # bytes beside the output while a layer runs: the hidden states before and behind it

    @classmethod
    def of(cls, groups: Groups, config: Mapping[str, Any]) -> SearchCost:
        """Return the cost for a model in 16 bits: two streams per group."""
        count = len(groups.groups)
        tokens, width = damage_tokens(count, groups.layers), int(text_config(config).get("hidden_size", 0))
        return cls(count, tokens, 2 * 2 * count * tokens * width * 2)

    def search(self, plan: QuantizationPlan, budget: Budget, config: Mapping[str, Any]) -> Search:
        """Return the cost as part of that of a run."""
        streams = [(self.tokens, 50)] * (2 * self.groups)
        shapes = {part.module: part.shape for tensor in plan.tensors for part in tensor.parts}
        what = f"the damage of {self.groups} groups of weights is"
        return Search.of_streams(what, streams, shapes, config, 1 if budget.max_kl is None else _ATTEMPTS)

    def require_disk(self, folder: Path) -> None:
        """Refuse a search for which the disk has no room, before any text is written."""
        free = shutil.disk_usage(folder).free
        if self.disk > free:
            raise UsageError(
                f"{folder}: measuring the damage of {self.groups} groups of weights takes {size_text(self.disk)} of "
                f"disk, and {size_text(free)} are free: make room, or mix formats by hand (--override)"
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


def _recipe(
    groups: Groups, chosen: Sequence[Scheme | None], user: Sequence[Override], cheapest: Scheme
) -> tuple[Scheme, list[Override]]:
    """Return the scheme that most weights have, and the overrides for all others."""
    weights: dict[Scheme, int] = {}
    for group, scheme in zip(groups.groups, chosen, strict=True):
        if scheme is not None:
            weights[scheme] = weights.get(scheme, 0) + group.weights
    default = max(weights, key=lambda scheme: weights[scheme], default=cheapest)
    return default, [*user, *mixture(groups, chosen, default)]


def _name(scheme: Scheme | None) -> str:
    return KEEP if scheme is None else scheme.name


@dataclass
class _Search:
    """The damages, and the choices that they lead to."""

    budget: Budget
    groups: Groups
    first: RoundedModel
    scheme: Scheme
    measured: list[MeasuredMixture] = field(default_factory=list)
    choices: list[Sequence[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = _measurable(self.groups, self.first.damage["given_back"])
        self.damages = tuple(_damages(self.groups.groups, self.first, self.scheme))
        costs = [[option.nbytes for option in group.options] for group in self.groups.groups]
        self._frontier = Frontier(costs, self.damages)
        self._aim = 1.0

    @property
    def cheapest(self) -> list[int]:
        """The choice of the cheapest format everywhere."""
        return [0] * len(self.groups.groups)

    def schemes(self, choice: Sequence[int]) -> tuple[Scheme | None, ...]:
        return tuple(group.options[option].scheme for group, option in zip(self.groups.groups, choice, strict=True))

    def add(self, choice: Sequence[int], kl: float) -> None:
        bits = self.groups.bits(self._frontier.cost(choice))
        predicted = self._frontier.damage(choice)
        self.choices.append(choice)
        self.measured.append(MeasuredMixture(bits, kl, predicted))
        if kl > 0:
            self._aim = min(self._aim, _MARGIN * predicted / kl)

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
            if len(self.measured) > 1:
                return None
            allowed = allowed_bytes(self.budget, self.groups)
            assert allowed is not None
            return self._frontier.within(allowed)
        if self.measured[-1].kl <= self.budget.max_kl:
            return None
        choice = self._frontier.reaching(self._aim * self.budget.max_kl)
        if choice is None or not any(self.schemes(choice)):
            best = min(self.measured, key=lambda mixture: mixture.kl)
            raise UsageError(
                f"{self.budget} cannot be met unless every weight stays as it is; {best.kl:.4f} nats at "
                f"{best.bits:.3f} bits per weight is the nearest that was measured"
            )
        return choice

    def curve(self) -> tuple[tuple[float, float], ...]:
        """Return bits per weight, and the least KL divergence that the damages predict."""
        return tuple((self.groups.bits(cost), damage) for cost, damage in self._frontier.points())


def _measurable(groups: Groups, given_back: Mapping[str, float]) -> Groups:
    """Return the groups, of which those without a measurement keep the cheapest format."""

    def limited(group: Group) -> Group:
        options = group.options if group.name in given_back else group.options[:1]
        return replace(group, options=options)

    return replace(groups, groups=tuple(map(limited, groups.groups)))


def _damages(groups: Sequence[Group], first: RoundedModel, scheme: Scheme) -> Iterator[tuple[float, ...]]:
    """Yield for each group the damage of each option; those of the cheapest format add up to the KL divergence."""
    whole, given_back, alone = first.damage["kl"], first.damage["given_back"], first.damage["alone"]
    # A method that follows the quantized model corrects part of an error in later groups. Giving a group back leaves
    # the corrections without the error, the group alone has the error without them: in the mean of both, the two
    # cancel.
    gains = {name: max((whole - given_back[name] + alone[name]) / 2, 0.0) for name in given_back}
    share = first.choosing["method"] / (sum(gains.values()) or 1.0)
    for group in groups:
        errors: dict[str, float] = {}
        for part in group.parts:
            for name, error in first.weights.get(part, {}).get("format_errors", {}).items():
                errors[name] = errors.get(name, 0.0) + error
        largest = errors.get(scheme.name) or 1.0
        damage = share * gains.get(group.name, 0.0)
        yield tuple(
            0.0 if option.scheme is None else damage * errors.get(option.scheme.name, largest) / largest
            for option in group.options
        )


def budget_chart(result: WithinBudget) -> str:
    """Return the chart of KL divergence against bits per weight, as predicted and as measured, as an SVG file."""
    from minifloat.report.document import Axis, Figure, Lines, Series
    from minifloat.report.figures import draw

    points = sorted((mixture.bits, mixture.kl) for mixture in result.measured)
    series = [Series("least that the damages of groups predict", result.frontier), Series("measured", points)]
    chart = Lines(series, Axis("bits per weight"), Axis("KL divergence, nats per token", log=True))
    return draw(Figure("KL divergence from the original model on held-out text, by bits per weight", chart), alone=True)
