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
    """Copy an array to a device, without waiting."""
    return staged(array, device).to(device, non_blocking=True)


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors of one device to the host. Only here does a step wait for the device."""
    if not tensors[0].is_cuda:
        return [tensor.clone() for tensor in tensors]
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        for tensor in tensors
    ]
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies
