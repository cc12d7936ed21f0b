"""Signal-to-quantization-noise ratio (SQNR) of the outputs of modules, on the baseline's inputs.

Only sums of squares are kept, so one pass measures every module on a sample of any size. A stack of experts is measured
at the output of the module that holds it, because that module has no output between its projections.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.evaluate.compare.attribution.differences import Difference, exchanged
from minifloat.evaluate.compare.transformers_model import TransformersModel
from minifloat.model.runtime.experts import QuantizedExperts


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
