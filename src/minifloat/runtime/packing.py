"""Packs the weights of a model for the kernels of the CPU or a GPU, and reports those that cannot be packed."""

from __future__ import annotations

import logging

import torch

from minifloat.errors import KernelUnavailable, UnknownNameError
from minifloat.runtime.linear import QuantizedWeight
from minifloat.runtime.tensors import listing

_LOG = logging.getLogger(__name__)

#: Values of `impl`: what multiplies quantized weights.
IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")
_DEVICES = {"cpu": "cpu", "triton": "cuda"}  # the device type of each implementation
NOT_MULTIPLIED = "the code of their experts does more with a weight than multiply"


class Packing:
    """Packs the weights of one model, one by one.

    Args:
        impl: As in `minifloat.runtime.load.load`.
        device: Device of the model.

    Raises:
        UnknownNameError: If `impl` has another value.
        KernelUnavailable: If `impl` names the kernels of another type of device.
    """

    def __init__(self, impl: str, device: torch.device) -> None:
        if impl not in IMPLEMENTATIONS:
            raise UnknownNameError("impl", impl, IMPLEMENTATIONS)
        self._impl = impl
        if impl in _DEVICES and device.type != _DEVICES[impl]:
            raise KernelUnavailable(
                f"impl={impl!r} computes on {_DEVICES[impl]} devices, and the model goes to {device}"
            )
        self._packs = impl in _DEVICES or (impl == "auto" and device.type in _DEVICES.values())
        self._num_packed = 0
        self._unpacked: dict[str, list[str]] = {}

    def pack(self, weight: QuantizedWeight, module: str, *, multiplied: bool = True) -> None:
        """Pack a weight, unless `impl` is the reference, or note the reason why it cannot be packed.

        Args:
            weight: The weight, on the device of the model.
            module: Name of the weight's module in the checkpoint.
            multiplied: Whether the model does nothing with the weight but multiply.

        Raises:
            KernelUnavailable: If the weight cannot be packed, and `impl` names the kernels.
        """
        if not self._packs:
            return
        reason = weight.pack() if multiplied else NOT_MULTIPLIED
        if reason and self._impl in _DEVICES:
            raise KernelUnavailable(f"{module}: the kernels cannot multiply it: {reason}")
        if reason:
            self._unpacked.setdefault(reason, []).append(module)
        else:
            self._num_packed += 1

    def warn(self) -> None:
        """Log the weights that were not packed, one warning per reason."""
        total = self._num_packed + sum(map(len, self._unpacked.values()))
        for reason, modules in self._unpacked.items():
            _LOG.warning(
                "%d of %d quantized weights are multiplied by the slow reference, because %s: %s",
                len(modules),
                total,
                reason,
                listing(modules),
            )
