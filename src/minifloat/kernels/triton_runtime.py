"""Tells whether Triton kernels can run, before a module that needs triton is imported: minifloat works without it."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

#: The environment variable that selects the interpreter. Triton reads it when a kernel is decorated, so it must be set
#: before the process starts.
INTERPRET = "TRITON_INTERPRET"


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPU tensors; it is slow and for tests only."""
    return os.environ.get(INTERPRET, "0") not in ("", "0")


def why_unavailable(device: str) -> str:
    """Return why Triton kernels cannot run on tensors of a device; empty if they can."""
    if not is_installed():
        return "triton is not installed: pip install triton"
    kind = device.partition(":")[0]
    if is_interpreted():
        return "" if kind == "cpu" else f"{INTERPRET}=1 runs kernels on the CPU, not on {device}"
    if kind != "cuda":
        return f"Triton kernels run on CUDA devices, not on {device}"
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    index = device.partition(":")[2]
    count = torch.cuda.device_count()
    return f"{device} does not exist, there are {count} CUDA devices" if index and int(index) >= count else ""


@cache
def is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
