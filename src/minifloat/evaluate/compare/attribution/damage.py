"""Damage of single modules of a quantized model, measured on as large a sample as a time budget allows.

One pass measures the signal-to-quantization-noise ratio (SQNR) of the outputs of all modules, on the baseline's inputs.
Every other measurement is one of a mixture: the candidate with some of its modules replaced by the baseline's. With all
modules but one from the baseline, it is the damage of this module alone; with one module from the baseline, the damage
of all others; with the modules of a suggestion, the effect of the suggestion. Only the candidate is changed, and only
while a measurement runs.

Modules are exchanged in the order of their expected damage, so that those left over when the time is up matter least.
One module of each role comes first, because the same noise does more damage in a key projection than in a gate.
"""

from __future__ import annotations

import copy
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.checkpoint.progress import Progress
from minifloat.evaluate.compare.attribution.differences import Difference, exchanged, is_stored_quantized
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.transformers_model import TransformersModel
from minifloat.kernels.divergence import Distribution, kl_divergence
from minifloat.model.runtime.experts import QuantizedExperts


class TimeBudget:
    """A time budget that starts when it is created."""

    def __init__(self, seconds: float, progress: Progress | None = None) -> None:
        self._seconds, self._progress = seconds, progress
        self._started = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    def until(self, fraction: float = 1.0) -> float:
        """Return the seconds until this fraction of the budget is spent; 0 after that."""
        return max(fraction * self._seconds - self.spent, 0.0)

    def report(self, activity: str) -> None:
        """Report the activity that starts now."""
        if self._progress is not None:
            total = round(self._seconds * 1000)
            self._progress(min(round(self.spent * 1000), total), total, activity)

    def finish(self) -> None:
        """Report the whole budget as spent."""
        if self._progress is not None:
            total = round(self._seconds * 1000)
            self._progress(total, total, "")


class _Meter:
    """Forward hook that sums the squares of one module's output and of its error."""

    def __init__(self, baseline: nn.Module, candidate: nn.Module, difference: Difference) -> None:
        self._baseline, self._candidate, self._difference = baseline, candidate, difference
        location = difference.locations[0]
        own, other = location.get(baseline), location.get(candidate)
        runs = isinstance(own, nn.Module) and not isinstance(own, QuantizedExperts) and isinstance(other, nn.Module)
        self._other = other if runs else None
        self.host = baseline.get_submodule(location.name if runs else location.holder)
        self.signal = self.noise = 0.0

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Run the candidate's module on the same inputs, and add the squares of the output and of the error."""
        if isinstance(self._other, nn.Module):
            other_output = self._other(*args, **kwargs)
        else:
            with exchanged(self._baseline, self._candidate, [self._difference]):
                other_output = module.forward(*args, **kwargs)
        expected = _tensor(output).double()
        self.signal += float(expected.square().sum())
        self.noise += float((_tensor(other_output).double() - expected).square().sum())

    def sqnr(self) -> float:
        """Return the ratio in dB: Inf without noise, -Inf without signal, NaN where the module never ran."""
        if math.isnan(self.noise) or math.isinf(self.noise):
            return -math.inf
        if self.noise == 0:
            return math.inf if self.signal else math.nan
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


@torch.inference_mode()
def measure_sqnr(
    baseline: TransformersModel,
    candidate: TransformersModel,
    differences: Sequence[Difference],
    batches: Iterable[Tensor],
) -> Mapping[Difference, float]:
    """Return the SQNR in dB of every difference."""
    meters = {difference: _Meter(baseline.model, candidate.model, difference) for difference in differences}
    with ExitStack() as hooks, candidate.set_up():
        for meter in meters.values():
            hooks.callback(meter.host.register_forward_hook(meter, with_kwargs=True).remove)
        for ids in batches:
            for _ in baseline.logits(ids):
                pass
    return {difference: meter.sqnr() for difference, meter in meters.items()}


def _tensor(output: Any) -> Tensor:
    """Return the first tensor of a module's output."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output


#: Tokens in a batch of windows.
_BATCH_TOKENS = 2048
#: Memory for the baseline's distributions. If they fit, they are computed only once.
_HELD_BYTES = 2**28


@dataclass(frozen=True)
class Distance:
    """Distance of a model from the baseline, on a sample.

    Attributes:
        kl: Mean KL divergence in nats per token.
    """

    kl: float
    ppl_increase: float
    same_top1: float

    def within(self, tolerance: Tolerance) -> bool:
        """Return whether the values, without intervals, keep all bounds."""
        return (
            self.kl <= tolerance.max_kl
            and self.ppl_increase <= tolerance.max_ppl_increase
            and self.same_top1 >= tolerance.min_same_top1
        )


class Mixtures:
    """Measures mixtures of two models on the same windows."""

    def __init__(self, baseline: TransformersModel, candidate: TransformersModel, windows: Tensor) -> None:
        self._baseline, self._candidate = baseline, candidate
        self._runner = copy.copy(candidate)
        self._runner.weight_only = False  # it would also apply to the baseline's modules
        self.windows = len(windows)
        self.tokens = self.windows * (windows.shape[1] - 1)
        self.batches = torch.split(windows, max(_BATCH_TOKENS // windows.shape[1], 1))
        self._logits = [list(baseline.logits(ids)) for ids in self.batches]
        width = torch.float64.itemsize * 2  # a `Distribution` has two large tensors
        self._hold_distributions = self.tokens * baseline.vocab_size * width <= _HELD_BYTES
        self._distributions: dict[tuple[int, int], Distribution] = {}

    @property
    def window_bytes(self) -> int:
        """Bytes per window of the baseline's logits, which are held."""
        return sum(logits.nbytes for of_batch in self._logits for logits in of_batch) // self.windows

    def measure(self, kept: Iterable[Difference], *, cache: bool = True) -> Distance:
        """Measure the candidate with some of the baseline's modules."""
        runner, kl, nll, agree = self._runner, 0.0, 0.0, 0.0
        runner.new_cache = self._candidate.new_cache if cache else self._baseline.new_cache
        with self._mixed(kept):
            for index, ids in enumerate(self.batches):
                start, targets = 0, ids[:, 1:].flatten()
                for p, logits in zip(self._baseline_of(index), runner.logits(ids), strict=True):
                    q, of_text = Distribution(logits), targets[start : start + len(logits)]
                    kl += float(kl_divergence(p, q).sum())
                    nll += float((q.nll(of_text) - p.nll(of_text)).sum())
                    agree += float((p.top[:, 0] == q.top[:, 0]).sum())
                    start += len(logits)
        return Distance(kl / self.tokens, _expm1(nll / self.tokens), agree / self.tokens)

    def keeps_quantized(self, kept: Iterable[Difference]) -> bool:
        """Return whether a mixture still has a weight that its checkpoint stores quantized."""
        with self._mixed(kept):
            return any(map(is_stored_quantized, self._candidate.model.modules()))

    @contextmanager
    def mixture(self, kept: Iterable[Difference]) -> Iterator[TransformersModel]:
        """Give the candidate with some of the baseline's modules while the context lasts."""
        self._runner.new_cache = self._candidate.new_cache
        with self._mixed(kept):
            yield self._runner

    @contextmanager
    def _mixed(self, kept: Iterable[Difference]) -> Iterator[None]:
        """Mix the models; each module quantizes its inputs or not as in the predictor that it comes from."""
        with (
            self._baseline.set_up(),
            self._candidate.set_up(),
            exchanged(self._candidate.model, self._baseline.model, kept),
        ):
            yield

    def _baseline_of(self, batch: int) -> Iterator[Distribution]:
        """Yield the baseline's distributions of a batch, some rows at a time."""
        for step, logits in enumerate(self._logits[batch]):
            p = self._distributions.get((batch, step)) or Distribution(logits)
            if self._hold_distributions:
                self._distributions[batch, step] = p
            yield p


def spread(windows: Tensor, count: float) -> Tensor:
    """Return about `count` windows, at least one, spread evenly over all windows."""
    whole = int(min(max(count, 1), len(windows)))
    return windows[torch.arange(whole) * len(windows) // whole]


def as_tensor(windows: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """Return windows of token ids as a tensor ``[B, W]``."""
    return windows if isinstance(windows, Tensor) else torch.tensor([list(window) for window in windows])


def _expm1(value: float) -> float:
    try:
        return math.expm1(value)
    except OverflowError:
        return math.inf


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
