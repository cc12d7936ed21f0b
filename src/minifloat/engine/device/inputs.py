"""`FP8Inputs`: which linears of a GPU multiply many rows with inputs in FP8, and the second copy of their weights.

A step of few rows takes as long as reading the weights, which the weight-only kernels read in their own order. A piece
of a prompt is bound by arithmetic, and tensor cores do twice as much of it in FP8. Their product takes weights as they
are stored, so each such weight is held twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from minifloat.errors import KernelUnavailable, UsageError
from minifloat.kernels.linear import scaled_mm
from minifloat.model.layouts import StoredWeight
from minifloat.model.runtime.inputs import W8A8, InputQuantization
from minifloat.model.runtime.linear import QuantizedWeight
from minifloat.model.runtime.tensors import StoredTensors, listing
from minifloat.numerics.tensor import QuantizedTensor

_LOG = logging.getLogger(__name__)


class FP8Inputs:
    """Makes the weights for inputs in FP8."""

    def __init__(self, tensors: StoredTensors, choice: str) -> None:
        self.nbytes = 0
        self._all = choice == "fp8"
        self._inputs = InputQuantization(tensors.checkpoint, weight_only=False, prefill=W8A8)
        self._without: dict[str, list[str]] = {}

    def weight(
        self, weight: QuantizedTensor, stored: Sequence[StoredWeight], dtype: torch.dtype
    ) -> QuantizedWeight | None:
        """Return a weight whose inputs are quantized; None if there is none.

        Linears of one product share the scale of their inputs: if static scales differ, the largest counts, as in vLLM.
        """
        if not self._all and any(part.activation is None for part in stored):
            return None
        found = [self._inputs.prefill_of(part) for part in stored]
        inputs = [each for each in found if each is not None]
        names = [part.module for part in stored]
        if len(inputs) < len(found):
            return None  # `InputQuantization.warn` names them
        spec = inputs[0][0]
        if any(other != spec for other, _ in inputs):
            self._without.setdefault("linears of one product declare different inputs", []).extend(names)
            return None
        reason = scaled_mm.why_not(weight, spec)
        if reason:
            self._without.setdefault(reason, []).extend(names)
            return None
        scales = [scale for _, scale in inputs if scale is not None]
        scale = torch.stack(scales).amax().to(weight.codes.device) if scales else None
        made = QuantizedWeight(weight, dtype, spec, scale)
        self.nbytes += made.nbytes
        return made

    def report(self) -> None:
        """Log what was made, and what was not."""
        reasons = "; ".join(f"{reason} ({listing(names)})" for reason, names in self._without.items())
        if self._all and not self.nbytes:
            raise KernelUnavailable(
                f"activations fp8: no weight of the model can have inputs in FP8: {reasons or 'none is E4M3'}"
            )
        self._inputs.warn()
        if reasons:
            _LOG.warning("inputs stay in 16 bits although they could be FP8: %s", reasons)
        if self.nbytes:
            _LOG.info(
                "prompts and large batches are multiplied in FP8, with a second copy of the weights (%d MiB); "
                "--activations bf16 does without",
                self.nbytes >> 20,
            )


def fp8_inputs(tensors: StoredTensors, choice: str) -> FP8Inputs | None:
    """Return what makes weights for inputs in FP8; None if no inputs are quantized."""
    if choice == "fp8" and not tensors.description.weights:
        raise UsageError("activations fp8: the checkpoint has no quantized weights")
    if choice == "fp8" or (choice == "auto" and tensors.description.quantizes_inputs):
        return FP8Inputs(tensors, choice)
    return None
