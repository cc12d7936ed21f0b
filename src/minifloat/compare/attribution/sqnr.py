"""Signal to quantization noise of the output of modules, on the inputs that the baseline gives them.

Sums of squares are all that is kept, so one pass measures every module whatever the sample's size. The noise of a stack
of experts is that of the module that holds it, which has no output between its projections.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.compare.attribution.differences import Difference, exchanged
from minifloat.compare.models import Predictor
from minifloat.runtime.experts import QuantizedExperts


class _Meter:
    """Sums the squares of one module's output and of its error."""

    def __init__(self, baseline: nn.Module, candidate: nn.Module, difference: Difference) -> None:
        self._baseline, self._candidate, self._difference = baseline, candidate, difference
        place = difference.places[0]
        held, other = place.get(baseline), place.get(candidate)
        runs = isinstance(held, nn.Module) and not isinstance(held, QuantizedExperts) and isinstance(other, nn.Module)
        self._other = other if runs else None
        self.host = baseline.get_submodule(place.name if runs else place.holder)
        self.signal = self.noise = 0.0

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """As a forward hook."""
        if isinstance(self._other, nn.Module):
            found = self._other(*args, **kwargs)
        else:
            with exchanged(self._baseline, self._candidate, [self._difference]):
                found = module.forward(*args, **kwargs)
        expected = _tensor(output).double()
        self.signal += float(expected.square().sum())
        self.noise += float((_tensor(found).double() - expected).square().sum())

    def sqnr(self) -> float:
        """In dB: Inf where there is no noise, -Inf where there is nothing else, NaN where the module never ran."""
        if math.isnan(self.noise) or math.isinf(self.noise):
            return -math.inf
        if self.noise == 0:
            return math.inf if self.signal else math.nan
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


@torch.inference_mode()
def measure_sqnr(
    baseline: Predictor, candidate: Predictor, differences: Sequence[Difference], batches: Iterable[Tensor]
) -> Mapping[Difference, float]:
    """The ratio in dB of every difference.

    Args:
        baseline: Is run.
        candidate: Its modules are run on the same inputs.
        differences: Of the two.
        batches: ``[B, W]`` token ids each.
    """
    meters = {difference: _Meter(baseline.model, candidate.model, difference) for difference in differences}
    with ExitStack() as hooks, candidate.set_up():
        for meter in meters.values():
            hooks.callback(meter.host.register_forward_hook(meter, with_kwargs=True).remove)
        for ids in batches:
            rows = baseline.features(ids).flatten(0, 1)
            for start in range(0, len(rows), baseline.head_rows()):
                baseline.logits(rows[start : start + baseline.head_rows()])
    return {difference: meter.sqnr() for difference, meter in meters.items()}


def _tensor(output: Any) -> Tensor:
    """The first tensor of a module's output."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output
