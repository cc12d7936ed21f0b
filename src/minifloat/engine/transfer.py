"""Copies between host and device: sending does not wait, and fetching waits once.

The host's memory of a copy lies in pinned pages, which torch reuses only when the copy is done.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def staged(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on the host that a device can copy from asynchronously."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    return staged(array, device).to(device, non_blocking=True)


class Fetch:
    """A copy of tensors of one device to the host, which begins now and does not wait."""

    def __init__(self, *tensors: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._copies = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            self._done.record(torch.cuda.current_stream(tensors[0].device))
        else:
            self._copies = [tensor.clone() for tensor in tensors]

    def wait(self) -> list[Tensor]:
        """Return the copies. Only here does a step wait for the device."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies
