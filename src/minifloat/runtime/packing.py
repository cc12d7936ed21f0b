"""Which weights of a model are packed for the kernels of the CPU or a GPU, and what is said of those that are not."""

from __future__ import annotations

import logging

import torch

from minifloat.errors import KernelUnavailable, UnknownNameError
from minifloat.runtime.linear import QuantizedWeight
from minifloat.runtime.tensors import listing

_LOG = logging.getLogger(__name__)

#: What may multiply quantized weights.
IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")
_DEVICES = {"cpu": "cpu", "triton": "cuda"}  # type of the device that each computes on
NOT_MULTIPLIED = "the code of their experts does more with a weight than multiply"


class Packing:
    """Packs weight by weight; lives as long as one `load`.

    Args:
        impl: As in `minifloat.runtime.load.load`.
        device: Where the model goes.

    Raises:
        UnknownNameError: Another `impl`.
        KernelUnavailable: `impl` names kernels of another kind of device.
    """

    def __init__(self, impl: str, device: torch.device) -> None:
        if impl not in IMPLEMENTATIONS:
            raise UnknownNameError("impl", impl, IMPLEMENTATIONS)
        self._impl = impl
        if impl in _DEVICES and device.type != _DEVICES[impl]:
            raise KernelUnavailable(
                f"impl={impl!r} computes on {_DEVICES[impl]} devices, and the model goes to {device}"
            )
        self._wanted = impl in _DEVICES or (impl == "auto" and device.type in _DEVICES.values())
        self._packed = 0
        self._unpacked: dict[str, list[str]] = {}

    def pack(self, weight: QuantizedWeight, module: str, *, multiplied: bool = True) -> None:
        """Pack a weight where that is wanted and can be, or note why it cannot.

        Args:
            weight: On its device.
            module: Its name in the checkpoint.
            multiplied: Whether the model does nothing else with it.

        Raises:
            KernelUnavailable: It cannot be, and `impl` names the kernels.
        """
        if not self._wanted:
            return
        reason = weight.pack() if multiplied else NOT_MULTIPLIED
        if reason and self._impl in _DEVICES:
            raise KernelUnavailable(f"{module}: the kernels cannot multiply it: {reason}")
        if reason:
            self._unpacked.setdefault(reason, []).append(module)
        else:
            self._packed += 1

    def warn(self) -> None:
        """Log what was not packed, one warning per reason."""
        total = self._packed + sum(map(len, self._unpacked.values()))
        for reason, modules in self._unpacked.items():
            _LOG.warning(
                "%d of %d quantized weights are multiplied by the slow reference, because %s: %s",
                len(modules),
                total,
                reason,
                listing(modules),
            )
