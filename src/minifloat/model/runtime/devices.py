"""Devices by their names."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from minifloat.errors import KernelUnavailable, UsageError

#: Compute capability of Ampere, the first with BF16 arithmetic.
_OLDEST = (8, 0)


def device_named(name: str) -> torch.device:
    """Return the device of a name: "cpu", "cuda" (the current GPU) or "cuda:N"."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device: expected cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise KernelUnavailable(f"device {name}: torch {torch.__version__} sees no NVIDIA GPU here")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise KernelUnavailable(f"device {name}: torch sees {torch.cuda.device_count()} GPUs")
    capability = torch.cuda.get_device_capability(index)
    if capability < _OLDEST:
        found = ".".join(map(str, capability))
        raise KernelUnavailable(f"device {name}: compute capability {found}; the kernels need 8.0 (Ampere) or newer")
    return torch.device("cuda", index)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread, on which kernels are launched; each thread begins with the first."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
