"""The memory that is free for a model."""

from __future__ import annotations

import psutil
import torch


def available_memory(device: str | torch.device) -> int:
    """Return the bytes that are free on a device: of the GPU, or of this machine's memory."""
    place = torch.device(device)
    return int(torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else psutil.virtual_memory().available)
