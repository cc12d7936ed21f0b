"""Chooses which inputs a scheme rounds, so that the model is predicted to keep the bounds of the verdict.

Before anything is rounded, `measured_losses` measures what rounding all inputs costs, and if that may be too much,
`measure_damage` what rounding those of each group costs. The damages of groups add up, as in a budget. Inputs stay in
16 bits for the groups with the least weights that suffice, or for all groups if these have most of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minifloat.calibration.data import CalibrationSet
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.progress import Progress
from minifloat.model.plan.overrides import Override
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.numerics.scheme import SCHEMES, Scheme
from minifloat.quantize.estimate import Search, visited_share
from minifloat.quantize.limits import MAX_KL, MAX_PPL_INCREASE, MIN_SAME_TOP1
from minifloat.quantize.rounding.budget import Frontier
from minifloat.quantize.rounding.budget_formats import Groups, find_groups, is_experts, mixture
from minifloat.quantize.rounding.group_damage import DAMAGE_TOKENS, Change, DamageRequest
from minifloat.quantize.rounding.input_walk import INPUTS, WEIGHTS, Loss, measured_losses
from minifloat.quantize.rounding.methods import Method, RoundingOptions
from minifloat.quantize.rounding.output_moments import OutputMoments
from minifloat.quantize.rounding.run import measure_damage
from minifloat.quantize.rounding.texts import SplitText, first_sequences

#: Share of each bound that a choice aims at, and that it may take up when it is measured: bounds hold for whole
#: intervals, and on other text.
AIM, ACCEPTED = 0.7, 0.85
#: KL of weights of eight bits that were rounded with data, as a share of that of the nearest ones, at most.
_WITH_DATA = 0.7
#: Share of the KL that inputs cost at least if it is worth the time to keep them in 16 bits.
_WORTH = 0.1
#: Largest share of the operations that have inputs in 16 bits beside others.
_MOST = 0.5
#: Tokens that measure the whole model.
_TOKENS = 4096
#: Name of the change that rounds inputs.
_INPUTS = "inputs"
#: Roundings of a model at most; the last has all inputs in 16 bits.
ATTEMPTS = 3
#: The bounds of the verdict on KL and perplexity as one: on text of the model, the logarithm of perplexity rises by KL.
_MAX_KL = min(MAX_KL, math.log1p(MAX_PPL_INCREASE))
_BOUNDS = f"compare allows about {_MAX_KL:.2g} (perplexity +{MAX_PPL_INCREASE:.0%}) and {1 - MIN_SAME_TOP1:.0%}"


def weight_only_counterpart(scheme: Scheme) -> Scheme:
    """Return the scheme with the same elements and inputs in 16 bits, of the same weights if there is one."""
    others = [s for s in SCHEMES.values() if s.activation is None and s.weight.element is scheme.weight.element]
    return next((other for other in others if other.weight == scheme.weight), others[0])


def within(loss: Loss, share: float) -> bool:
    """Return whether a loss takes up at most a share of the bounds on KL; top-1 changes with the root of KL."""
    return loss.kl <= share * _MAX_KL and loss.disagreement <= math.sqrt(share) * (1 - MIN_SAME_TOP1)


@dataclass(frozen=True)
class Prediction:
    """The loss of a model whose weights are rounded by a method, by the share of the damage that its inputs do."""

    weights: Loss
    whole: Loss

    @classmethod
    def before(cls, nearest: Loss, whole: Loss, method: Method) -> Prediction:
        """Return the prediction from the losses with nearest weights, without and with rounded inputs."""
        part = _WITH_DATA if method.needs_data else 1.0
        weights = Loss(nearest.kl * part, nearest.disagreement * math.sqrt(part))
        kl = weights.kl + max(whole.kl - nearest.kl, 0.0)
        return cls(weights, Loss(kl, whole.disagreement * _root(kl, whole.kl)))

    def at(self, share: float) -> Loss:
        """Return the loss if the inputs that do a share of the damage are rounded."""
        kl = self.weights.kl + share * (self.whole.kl - self.weights.kl)
        return Loss(kl, self.whole.disagreement * _root(kl, self.whole.kl))

    def largest(self, aim: float) -> float | None:
        """Return the largest share of the damage that keeps the bounds; None: not even 16-bit inputs do."""
        of_top1 = self.whole.kl * aim * ((1 - MIN_SAME_TOP1) / (self.whole.disagreement or 1.0)) ** 2
        left = min(aim * _MAX_KL, of_top1) - self.weights.kl
        return None if left < 0 else min(left / ((self.whole.kl - self.weights.kl) or 1.0), 1.0)

    def after(self, share: float, measured: Loss) -> Prediction:
        """Return the prediction that agrees with what was measured at a share of the damage."""
        more = measured.kl - self.at(share).kl
        kl = self.whole.kl + more
        return Prediction(
            replace(self.weights, kl=self.weights.kl + more),
            Loss(kl, measured.disagreement * _root(kl, measured.kl)),
        )


def _root(kl: float, other: float) -> float:
    """Return the factor between the shares of tokens with another top-1 that go with two divergences."""
    return math.sqrt(max(kl, 0.0) / other) if other > 0 else 1.0


@dataclass
class InputChoice:
    """The inputs that a scheme rounds, and why."""

    scheme: Scheme
    other: Scheme
    user: Sequence[Override]
    prediction: Prediction
    first: Prediction = field(init=False)
    costly: bool = False  # whether rounded inputs may break the bounds
    groups: Groups | None = None
    damages: tuple[float, ...] = ()
    wide: tuple[bool, ...] = ()  # for each group whether its inputs stay in 16 bits; empty: all are rounded
    everywhere: bool = False  # whether all inputs stay in 16 bits
    refused: bool = False  # whether 16-bit inputs do not load where the scheme does
    measured: list[Loss] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first = self.prediction

    @property
    def share(self) -> float:
        """The share of the damage that the rounded inputs do."""
        if self.everywhere:
            return 0.0
        total = sum(self.damages) or 1.0
        return 1.0 - sum(damage for damage, wide in zip(self.damages, self.wide, strict=False) if wide) / total

    @property
    def wide_weights(self) -> float:
        """The share of the operations whose inputs stay in 16 bits."""
        if self.groups is None:
            return float(self.everywhere)
        weights = [group.weights for group in self.groups.groups]
        return sum(count for count, wide in zip(weights, self.wide, strict=False) if wide) / max(sum(weights), 1)

    def recipe(self) -> tuple[Scheme, list[Override]]:
        """Return the scheme of most weights, and all overrides."""
        if self.everywhere or self.groups is None or not any(self.wide):
            return (self.other if self.everywhere else self.scheme), list(self.user)
        chosen = [self.other if wide else self.scheme for wide in self.wide]
        return self.scheme, [*self.user, *mixture(self.groups, chosen, self.scheme)]

    def choose(self, loads: Callable[[Scheme, Sequence[Override]], bool], *, last: bool = False) -> None:
        """Take the cheapest inputs to keep in 16 bits that are predicted to keep the bounds, or all if it is `last`."""
        if not self.costly or self.refused:
            return
        before, allowed = self.wide, None if last else self.prediction.largest(AIM)
        if allowed is not None and self.groups is not None:
            costs = [[0, group.weights] for group in self.groups.groups]
            frontier = Frontier(costs, [[damage, 0.0] for damage in self.damages])
            choice = frontier.reaching(allowed * sum(self.damages)) or [1] * len(costs)
            self.wide = tuple(option == 1 for option in choice)
        self.everywhere = allowed is None or self.wide_weights > _MOST or self.wide == before
        if not self.everywhere and not loads(*self.recipe()):
            self.everywhere = True
        if self.everywhere and not loads(*self.recipe()):
            self.everywhere, self.wide, self.refused = False, (), True

    def accepts(self, kl: float, disagreement: float) -> bool:
        """Record what a rounded model gave, and return whether it is the result."""
        self.measured.append(Loss(kl, disagreement))
        done = self.everywhere or self.refused or not self.costly or within(self.measured[-1], ACCEPTED)
        if not done:
            self.prediction = self.prediction.after(self.share, self.measured[-1])
        return done

    def notes(self) -> Iterator[str]:
        """Yield sentences for the user."""
        whole, weights = self.first.whole, self.first.weights
        costs = (
            f"on this text, rounding all inputs was predicted to give KL {whole.kl:.4f} and another top-1 for "
            f"{whole.disagreement:.1%} of the tokens, 16-bit inputs KL {weights.kl:.4f} and "
            f"{weights.disagreement:.1%}; {_BOUNDS}"
        )
        name, other = self.scheme.name, self.other.name
        if self.everywhere:
            yield (
                f"All inputs stay in 16 bits, so the scheme became {other} instead of {name}: {costs}. "
                f"--scheme {name} rounds inputs nevertheless."
            )
        elif any(self.wide):
            total = (
                f"{sum(self.wide)} of {len(self.wide)} groups of weights ({self.wide_weights:.0%} of the operations)"
            )
            yield (
                f"{name} with 16-bit inputs for {total}: {costs}. --scheme {name} rounds all inputs, "
                f"--scheme {other} none."
            )
        elif self.refused:
            yield f"{name} rounds all inputs, because 16-bit inputs do not load where it does: {costs}."
        if len(self.measured) > 1:
            yield f"KL of the attempts: {', '.join(f'{loss.kl:.4f}' for loss in self.measured)}."
        if self.measured and not (last := self.measured[-1]).kl <= MAX_KL:
            yield f"WARNING: the KL on the text that chooses is {last.kl:.4f}, and compare allows {MAX_KL:g}."

    def to_dict(self) -> dict[str, Any]:
        """Return the choice and what it came from as JSON values."""
        names = [] if self.groups is None else [group.name for group in self.groups.groups]
        return {
            "predicted": {"all_inputs": vars(self.first.whole), "no_inputs": vars(self.first.weights)},
            "measured": [{"kl": loss.kl, "disagreement": loss.disagreement} for loss in self.measured],
            "all_16_bit": self.everywhere,
            "groups": [
                {"group": name, "damage": damage, "16_bit": self.everywhere or wide}
                for name, damage, wide in zip(names, self.damages, self.wide or [False] * len(names), strict=True)
            ],
        }


@contextmanager
def input_choice(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    texts: SplitText,
    options: RoundingOptions,
    work_dir: Path,
    moments: OutputMoments,
    progress: Progress | None = None,
) -> Iterator[InputChoice]:
    """Measure what the inputs of a plan cost; the files stay until the block is left without an error.

    `moments` keeps the moments of outputs that are taken with the damage of groups.
    """
    report: Progress | None = None
    if progress is not None:

        def report(done: int, total: int, where: str) -> None:
            progress(done, total, f"measuring inputs: {where}")

    part = CalibrationSet(first_sequences(texts.kept.sequences, _TOKENS))
    folder = work_dir.with_name(f"{work_dir.name}-inputs")
    with measured_losses(checkpoint, plan, part, options, folder, report) as found:
        nearest, both = found[WEIGHTS], found[INPUTS]
        prediction = Prediction.before(nearest, both, options.method)
        choice = InputChoice(plan.scheme, weight_only_counterpart(plan.scheme), plan.overrides, prediction)
        inputs = prediction.whole.kl - prediction.weights.kl
        choice.costly = not within(prediction.whole, AIM) and inputs > _WORTH * both.kl
        if choice.costly and prediction.largest(AIM) is not None:
            choice.groups = groups = groups_with_inputs(plan, checkpoint.config)
            request = DamageRequest({g.name: g.parts for g in groups.groups}, {_INPUTS: Change(plan, inputs=True)})
            damages = measure_damage(checkpoint, request, texts, options, moments, report)
            choice.damages = tuple(damages.get(group.name, {}).get(_INPUTS, 0.0) for group in groups.groups)
        yield choice


def chooses_inputs(scheme: Scheme | None, plan: QuantizationPlan) -> bool:
    """Return whether a run with text chooses which inputs of a plan are rounded, because no scheme is named."""
    inputs = plan.scheme.activation
    return scheme is None and inputs is not None and not inputs.needs_calibration


def inputs_search(plan: QuantizationPlan, config: Mapping[str, Any]) -> Search:
    """Return what it takes to choose the inputs of a plan, at most."""
    shapes = {part.module: part.shape for tensor in plan.tensors for part in tensor.parts}
    streams = [(_TOKENS, 100)] * 3 + [(DAMAGE_TOKENS, 100)] * 2
    return Search.of_streams("what rounding inputs costs is", streams, shapes, config, ATTEMPTS - 1)


def groups_with_inputs(plan: QuantizationPlan, config: Mapping[str, Any]) -> Groups:
    """Return the groups whose inputs a plan rounds; their weights are those that a token meets."""
    rounded = {name for name, scheme in plan.modules.items() if scheme.activation is not None}
    visited = visited_share(config)
    groups = find_groups(plan, [], plan.overrides)
    members = [group for group in groups.groups if rounded.intersection(group.parts)]
    members = [replace(g, weights=round(g.weights * visited)) if is_experts(g) else g for g in members]
    return replace(groups, groups=tuple(members))
