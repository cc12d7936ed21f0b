"""Damage of single modules of a quantized model, measured on as large a sample as the time budget allows.

Modules are exchanged in the order of their expected damage, so that those left over when the time is up matter least.
One module of each role comes first, because the same noise does more damage in a key projection than in a gate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from minifloat.evaluate.compare.attribution.budget import TimeBudget
from minifloat.evaluate.compare.attribution.differences import Difference
from minifloat.evaluate.compare.attribution.mixture import Mixtures, spread
from minifloat.evaluate.compare.attribution.sqnr import measure_sqnr
from minifloat.evaluate.compare.transformers_model import TransformersModel

#: Scored tokens of the first sample.
_FEWEST_TOKENS = 512
#: Memory for the baseline's logits on a sample.
_LOGIT_BYTES = 2**31
#: Time of measuring all SQNRs, in passes of one model.
_SQNR_PASSES = 3
#: Fraction of the remaining time to plan for measuring again on a larger sample, so that it ends in time.
_PLANNED_SHARE = 0.7
#: Smallest growth of the sample that justifies measuring again.
_SMALLEST_GROWTH = 1.5


class Expectation:
    """Expected damage of modules, from the noise of their outputs and the damage of measured modules of their role."""

    def __init__(self, sqnr: Mapping[Difference, float]) -> None:
        self.sqnr = sqnr
        self._ratios: dict[str, list[float]] = defaultdict(list)

    def noise(self, difference: Difference) -> float:
        """Return the power of the noise relative to the signal; 0 where the module never ran."""
        sqnr = self.sqnr[difference]
        return 0.0 if math.isnan(sqnr) else 10 ** (-sqnr / 10)

    def add(self, difference: Difference, kl: float) -> None:
        """Add the measured KL divergence of a module."""
        noise = self.noise(difference)
        if math.isfinite(kl) and 0 < noise < math.inf:
            self._ratios[difference.role].append(kl / noise)

    def has_new_role(self, difference: Difference) -> bool:
        """Return whether no module of the same role has been measured, and the module has noise."""
        return difference.role not in self._ratios and self.noise(difference) > 0

    def damage(self, difference: Difference) -> float:
        """Return the expected KL divergence in nats per token; for a role without measurement, from all roles."""
        ratios = self._ratios.get(difference.role) or [r for of_role in self._ratios.values() for r in of_role] or [1.0]
        noise = self.noise(difference)
        return noise * sum(ratios) / len(ratios) if math.isfinite(noise) else math.inf


@dataclass(frozen=True)
class Damage:
    """The measurements on one sample.

    Attributes:
        alone: KL divergence in nats per token of each module that was exchanged alone.
        seconds: Time of the measurements.
    """

    mixtures: Mixtures
    expected: Expectation
    alone: dict[Difference, float]
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether every module was exchanged alone."""
        return len(self.alone) == len(self.expected.sqnr)

    def sample(self, windows: Tensor, seconds: float) -> Tensor:
        """Return as many windows as one pass can run in `seconds`, but no fewer than in this sample."""
        passes = max(len(self.alone), 1) + _SQNR_PASSES
        growth = max(seconds * passes / self.seconds, 1)
        largest = _LOGIT_BYTES // self.mixtures.window_bytes
        return spread(windows, min(growth * self.mixtures.windows, largest))


def measure_damage(
    baseline: TransformersModel,
    candidate: TransformersModel,
    differences: Sequence[Difference],
    windows: Tensor,
    budget: TimeBudget,
    end: float,
) -> Damage:
    """Measure all modules on a small sample, then on larger samples as long as the time allows."""
    sample = spread(windows, math.ceil(_FEWEST_TOKENS / (windows.shape[1] - 1)))
    best = None
    while True:
        started = budget.spent
        mixtures = Mixtures(baseline, candidate, sample)
        budget.report("output of all modules")
        expected = Expectation(measure_sqnr(baseline, candidate, differences, mixtures.batches))
        alone = _measure_alone(mixtures, expected, budget, end)
        damage = Damage(mixtures, expected, alone, budget.spent - started)
        best = damage if best is None or damage.complete else best
        sample = damage.sample(windows, _PLANNED_SHARE * budget.until(end) / (len(differences) + _SQNR_PASSES))
        if not damage.complete or len(sample) < _SMALLEST_GROWTH * mixtures.windows:
            return best


def _measure_alone(
    mixtures: Mixtures, expected: Expectation, budget: TimeBudget, end: float
) -> dict[Difference, float]:
    """Return the KL divergences of modules exchanged alone, as many as the time allows.

    One module of each role comes first, then the module with the largest expected damage.
    """
    differences = list(expected.sqnr)
    alone: dict[Difference, float] = {}
    while len(alone) < len(differences) and budget.until(end):
        exchanged = max(
            (difference for difference in differences if difference not in alone),
            key=lambda difference: (expected.has_new_role(difference), expected.damage(difference)),
        )
        budget.report(f"{exchanged.name} alone")
        others = [difference for difference in differences if difference is not exchanged]
        alone[exchanged] = mixtures.measure(others, cache=False).kl
        expected.add(exchanged, alone[exchanged])
    return alone
