"""Between host and device: what is sent does not wait, and what is fetched waits once.

Memory that the device copies from or to lies in pinned pages, which torch hands out again only when the copy is done.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def staged(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array as a tensor on the host that a device copies from without waiting."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device, without waiting."""
    return staged(array, device).to(device, non_blocking=True)


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one device on the host. This is the only place of a step that waits for the device."""
    if not tensors[0].is_cuda:
        return [tensor.clone() for tensor in tensors]
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        for tensor in tensors
    ]
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies
