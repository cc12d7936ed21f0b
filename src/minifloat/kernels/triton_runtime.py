"""Whether Triton kernels can run: asked before a module with one is imported, since minifloat works without triton."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

#: Triton reads it when a kernel is decorated, so it is set before the process starts or not at all.
INTERPRET = "TRITON_INTERPRET"


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which takes tensors of the CPU: for tests only, it is slow."""
    return os.environ.get(INTERPRET, "0") not in ("", "0")


def why_unavailable(device: str) -> str:
    """Why Triton kernels cannot run on tensors of a device; empty where they can.

    Args:
        device: As torch names it: ``"cuda"``, ``"cuda:1"``, ``"cpu"``.
    """
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
    """Whether there is a triton to import."""
    return importlib.util.find_spec("triton") is not None
