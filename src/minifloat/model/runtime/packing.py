"""Packs the weights of a model for the kernels of the CPU or a GPU, and reports those that cannot be packed."""

from __future__ import annotations

import logging

import torch

from minifloat.errors import KernelUnavailable, UnknownNameError
from minifloat.kernels.linear import int8_inputs
from minifloat.kernels.pack import PackedWeight
from minifloat.model.runtime.linear import QuantizedWeight
from minifloat.model.runtime.tensors import listing
from minifloat.numerics.formats import E2M1, E4M3
from minifloat.numerics.tensor import QuantizedTensor

_LOG = logging.getLogger(__name__)

#: Values of `impl`: what multiplies quantized weights.
IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")
_DEVICES = {"cpu": "cpu", "triton": "cuda"}  # the device type of each implementation
NOT_MULTIPLIED = "the code of their experts does more with a weight than multiply"


class Packing:
    """Packs the weights of one model, one by one."""

    def __init__(self, impl: str, device: torch.device, *, int8_inputs: bool = False) -> None:
        if impl not in IMPLEMENTATIONS:
            raise UnknownNameError("impl", impl, IMPLEMENTATIONS)
        self._impl = impl
        if impl in _DEVICES and device.type != _DEVICES[impl]:
            raise KernelUnavailable(
                f"impl={impl!r} computes on {_DEVICES[impl]} devices, and the model goes to {device}"
            )
        self._packs = impl in _DEVICES or (impl == "auto" and device.type in _DEVICES.values())
        self._int8_inputs = int8_inputs
        self._num_packed = self._num_rounded = 0
        self._not_rounded: dict[str, list[str]] = {}
        self._unpacked: dict[str, list[str]] = {}

    def pack(self, weight: QuantizedWeight, module: str, *, multiplied: bool = True) -> None:
        """Pack a weight, unless `impl` is the reference, or note the reason why it cannot be packed."""
        reason = ""
        if self._packs:
            reason = weight.pack() if multiplied else NOT_MULTIPLIED
        if self._int8_inputs:
            self._allow_int8(weight, module, reason)
        if not self._packs:
            return
        if reason and self._impl in _DEVICES:
            raise KernelUnavailable(f"{module}: the kernels cannot multiply it: {reason}")
        if reason:
            self._unpacked.setdefault(reason, []).append(module)
        else:
            self._num_packed += 1

    def _allow_int8(self, weight: QuantizedWeight, module: str, reason: str) -> None:
        """Let a weight round its inputs to int8, or note the reason why it cannot."""
        held = weight.held
        if not reason and isinstance(held, PackedWeight):
            reason = int8_inputs.why_not(held)
        elif not reason and not (isinstance(held, QuantizedTensor) and held.spec.element in (E4M3, E2M1)):
            reason = "they are no floating-point numbers"
        weight.int8_inputs = not reason
        self._note_int8(module, reason)

    def _note_int8(self, module: str, reason: str) -> None:
        if reason:
            self._not_rounded.setdefault(reason, []).append(module)
        else:
            self._num_rounded += 1

    def _warn_of_int8(self) -> None:
        total = self._num_rounded + sum(map(len, self._not_rounded.values()))
        if self._int8_inputs and not self._num_rounded:
            reasons = "; ".join(self._not_rounded) or "none is quantized"
            raise KernelUnavailable(f"activations int8: no weight of the model can have inputs in int8: {reasons}")
        for reason, modules in self._not_rounded.items():
            _LOG.warning(
                "inputs of %d of %d quantized weights are not rounded to int8, because %s: %s",
                len(modules),
                total,
                reason,
                listing(modules),
            )

    def warn(self) -> None:
        """Log the weights that were not packed, and those whose inputs are not rounded; one warning per reason."""
        self._warn_of_int8()
        total = self._num_packed + sum(map(len, self._unpacked.values()))
        for reason, modules in self._unpacked.items():
            _LOG.warning(
                "%d of %d quantized weights are multiplied by the slow reference, because %s: %s",
                len(modules),
                total,
                reason,
                listing(modules),
            )
