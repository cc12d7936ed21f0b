"""The front of an attribution: what is measured of modules, in which order, and how the time is shared out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.compare.attribution.budget import TimeBudget
from minifloat.compare.attribution.damage import measure_damage
from minifloat.compare.attribution.differences import Difference, find_differences, stored_bytes
from minifloat.compare.attribution.mixture import Mixtures, as_tensor
from minifloat.compare.attribution.suggestion import KeepableGroups, Suggestion, suggest
from minifloat.compare.models import Predictor, match_experts_implementation
from minifloat.compare.verdict import Tolerance
from minifloat.report.progress import Progress
from minifloat.runtime.linear import QuantizedWeight

#: Of the time, when modules alone and models without one are done; the rest is for the suggestion.
_ALONE_ENDS, _WITHOUT_ENDS = 0.4, 0.6
#: Passes of a suggestion that its sample is chosen for, beside those of the bisection.
_PRUNING_PASSES = 8


@dataclass(frozen=True)
class ModuleDamage:
    """What one module does to the model.

    Attributes:
        module: Its name in the model.
        sqnr_db: Signal to quantization noise of its output, both models' module given the baseline's inputs; Inf where
            the outputs are the same, NaN where the sample never ran it.
        kl_alone: Mean KL divergence in nats per token of the baseline with this module exchanged; None: not measured.
        kl_without: The same of the candidate with this module alone the baseline's: what remains; None: not measured.
        extra_bytes: By how much the baseline's module is larger.
    """

    module: str
    sqnr_db: float
    kl_alone: float | None
    kl_without: float | None
    extra_bytes: int


@dataclass(frozen=True)
class Attribution:
    """The result of `attribute`.

    Attributes:
        rows: All modules that differ, the worst first: those with a `kl_alone` by it, then the others by their SQNR.
        tokens: Scored tokens of the sample that `rows` are of.
        seconds: That it took.
        measured: How many rows have a `kl_alone`.
        of: How many rows there are.
        suggestion: None where the candidate is within the tolerance already, where no override can help (the
            difference is not one of quantization), or where the time was up before it could be looked for.
    """

    rows: tuple[ModuleDamage, ...]
    tokens: int
    seconds: float
    measured: int
    of: int
    suggestion: Suggestion | None


@torch.inference_mode()
def attribute(
    baseline: Predictor,
    candidate: Predictor,
    windows: Tensor | Sequence[Sequence[int]],
    tolerance: Tolerance,
    seconds: float,
    progress: Progress | None = None,
) -> Attribution:
    """Find what each module contributes to the difference of two models, and which to keep in 16 bits.

    Modules are exchanged in place and put back, also on an interrupt. Where the candidate runs with a quantized KV
    cache, `ModuleDamage.kl_alone` is without it and everything else with it. Mixture-of-experts models run
    transformers' eager experts from then on if one side's are quantized.

    Args:
        baseline: The model that the other is held against.
        candidate: Of the same architecture.
        windows: ``[B, W]`` token ids with what every window begins with; of those a sample is used.
        tolerance: What a suggestion has to bring the candidate within.
        seconds: About how long to measure; a few passes over 512 tokens are made, whatever they take.
        progress: Called before each measurement, with milliseconds of the time.

    Raises:
        UsageError: The models are of different architectures or sizes.
        CheckpointError: The baseline's folder, which names the weights, cannot be read.
    """
    budget = TimeBudget(seconds, progress)
    match_experts_implementation([baseline, candidate])
    with baseline.set_up(), candidate.set_up():
        differences = find_differences(baseline.model, candidate.model)
    if not differences:
        budget.end()
        return Attribution((), 0, budget.spent, 0, 0, None)
    windows = as_tensor(windows)
    measured = measure_damage(baseline, candidate, differences, windows, budget, _ALONE_ENDS)
    expected, alone = measured.expected, measured.alone
    ranked = sorted(differences, key=lambda d: _rank(alone.get(d), expected.noise(d)))
    without = _measure_without(measured.mixtures, [d for d in ranked if d in alone], budget)
    extra = _extra_bytes(baseline, candidate, differences)
    rows = tuple(ModuleDamage(d.name, expected.sqnr[d], alone.get(d), without.get(d), extra[d]) for d in ranked)
    damage = {difference: alone.get(difference, expected.damage(difference)) for difference in ranked}
    choices = KeepableGroups.of(baseline, candidate, damage, extra)
    suggestion = None
    if choices.groups and budget.until():
        passes = math.ceil(math.log2(len(choices.groups) + 1)) + 1 + _PRUNING_PASSES
        sample = measured.sample(windows, budget.until() / passes)
        suggestion = suggest(choices, Mixtures(baseline, candidate, sample), tolerance, budget)
    budget.end()
    return Attribution(rows, measured.mixtures.tokens, budget.spent, len(alone), len(rows), suggestion)


def _measure_without(mixtures: Mixtures, ranked: Sequence[Difference], budget: TimeBudget) -> dict[Difference, float]:
    """KL divergences of the candidate without single differences, the first first."""
    without: dict[Difference, float] = {}
    for difference in ranked:
        if not budget.until(_WITHOUT_ENDS):
            break
        budget.tell(f"without {difference.name}")
        without[difference] = mixtures.measure([difference]).kl
    return without


def _rank(kl: float | None, noise: float) -> tuple[bool, float]:
    """Measured before not measured, then the worst first; NaN is the worst."""
    value = noise if kl is None else kl
    return kl is None, -math.inf if math.isnan(value) else -value


def _extra_bytes(baseline: Predictor, candidate: Predictor, differences: Sequence[Difference]) -> dict[Difference, int]:
    """By how much each of the baseline's modules is larger, as checkpoints store them."""
    model = baseline.model
    quantized = sum(module.nbytes for module in model.modules() if isinstance(module, QuantizedWeight))
    elements = sum(parameter.numel() for parameter in model.parameters())
    element_bytes = round((baseline.nbytes - quantized) / max(elements, 1))
    return {
        difference: stored_bytes(difference.places[0].get(model), element_bytes)
        - stored_bytes(difference.places[0].get(candidate.model), element_bytes)
        for difference in differences
    }
