"""What single modules of a quantized model do to its predictions, on as large a sample as the time allows.

Modules are exchanged in the order of the damage that is expected of them, so that what the time does not suffice for
matters least. First one of each kind: the same noise does more in a key projection than in a gate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from minifloat.compare.attribution.budget import TimeBudget
from minifloat.compare.attribution.differences import Difference
from minifloat.compare.attribution.mixture import Mixtures, spread
from minifloat.compare.attribution.sqnr import measure_sqnr
from minifloat.compare.models import Predictor

#: Of the first sample.
_FEWEST_TOKENS = 512
#: Of inputs of the head that are held for a sample.
_FEATURE_BYTES = 2**30
#: What the SQNR takes, in passes of one model.
_SQNR_PASSES = 3
#: Of the time that is left, what measuring again on a larger sample may take, so that it is done in time.
_PART = 0.7
#: By how much a sample has to be larger to measure again.
_WORTHWHILE = 1.5


class Expectation:
    """What damage is expected of modules, by the noise of their output and what others of their kind did.

    Args:
        sqnr: Of all modules, in dB.
    """

    def __init__(self, sqnr: Mapping[Difference, float]) -> None:
        self.sqnr = sqnr
        self._ratios: dict[str, list[float]] = defaultdict(list)

    def noise(self, difference: Difference) -> float:
        """Relative to the signal; 0 where the module never ran."""
        sqnr = self.sqnr[difference]
        return 0.0 if math.isnan(sqnr) else 10 ** (-sqnr / 10)

    def learn(self, difference: Difference, kl: float) -> None:
        """Take note of what was measured."""
        noise = self.noise(difference)
        if math.isfinite(kl) and 0 < noise < math.inf:
            self._ratios[difference.role].append(kl / noise)

    def is_needed(self, difference: Difference) -> bool:
        """Whether none of its kind was measured."""
        return difference.role not in self._ratios and self.noise(difference) > 0

    def damage(self, difference: Difference) -> float:
        """KL divergence in nats per token; of an unknown kind that of the average one."""
        ratios = self._ratios.get(difference.role) or [r for known in self._ratios.values() for r in known] or [1.0]
        noise = self.noise(difference)
        return noise * sum(ratios) / len(ratios) if math.isfinite(noise) else math.inf


@dataclass(frozen=True)
class Damage:
    """What was measured on one sample.

    Attributes:
        mixtures: The sample.
        expected: From the SQNR of all modules, and what was learned.
        alone: KL divergences of single exchanges, as far as the time allowed.
        seconds: That it took.
    """

    mixtures: Mixtures
    expected: Expectation
    alone: dict[Difference, float]
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether every module was exchanged."""
        return len(self.alone) == len(self.expected.sqnr)

    def sample(self, windows: Tensor, seconds: float) -> Tensor:
        """As many windows as a pass of so many seconds can run, but no fewer than here."""
        passes = max(len(self.alone), 1) + _SQNR_PASSES
        growth = max(seconds * passes / self.seconds, 1)
        most = _FEATURE_BYTES // self.mixtures.feature_bytes
        return spread(windows, min(growth * self.mixtures.windows, most))


def measure_damage(
    baseline: Predictor,
    candidate: Predictor,
    differences: Sequence[Difference],
    windows: Tensor,
    budget: TimeBudget,
    end: float,
) -> Damage:
    """Measure all modules on a small sample, then on larger ones as long as the time allows.

    Args:
        baseline: Gives modules their inputs, and the predictions that others are held against.
        candidate: Whose modules do the damage.
        differences: Of the two.
        windows: ``[B, W]`` token ids, of which samples are taken.
        budget: The time.
        end: How much of it may be spent.

    Returns:
        Of the largest sample on which every module could be exchanged; of the first if that was none.
    """
    sample = spread(windows, math.ceil(_FEWEST_TOKENS / (windows.shape[1] - 1)))
    best = None
    while True:
        started = budget.spent
        mixtures = Mixtures(baseline, candidate, sample)
        budget.tell("output of all modules")
        expected = Expectation(measure_sqnr(baseline, candidate, differences, mixtures.batches))
        alone = _measure_alone(mixtures, expected, budget, end)
        found = Damage(mixtures, expected, alone, budget.spent - started)
        best = found if best is None or found.complete else best
        sample = found.sample(windows, _PART * budget.until(end) / (len(differences) + _SQNR_PASSES))
        if not found.complete or len(sample) < _WORTHWHILE * mixtures.windows:
            return best


def _measure_alone(
    mixtures: Mixtures, expected: Expectation, budget: TimeBudget, end: float
) -> dict[Difference, float]:
    """KL divergences of single exchanges: one of each kind first, then those that are expected to be the worst."""
    differences = list(expected.sqnr)
    alone: dict[Difference, float] = {}
    while len(alone) < len(differences) and budget.until(end):
        chosen = max(
            (difference for difference in differences if difference not in alone),
            key=lambda difference: (expected.is_needed(difference), expected.damage(difference)),
        )
        budget.tell(f"{chosen.name} alone")
        others = [difference for difference in differences if difference is not chosen]
        alone[chosen] = mixtures.measure(others, cache=False).kl
        expected.learn(chosen, alone[chosen])
    return alone
