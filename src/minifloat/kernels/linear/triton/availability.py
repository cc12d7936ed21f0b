"""Tells whether the kernels can run on a device, and why not. Imports no triton."""

from __future__ import annotations

from functools import cache

import torch

from minifloat.kernels.triton_runtime import why_unavailable

#: The first compute capability with bfloat16 tensor cores and asynchronous copies.
MIN_CAPABILITY = (8, 0)


def why_not(device: torch.device | str = "cuda") -> str:
    """Return why the kernels cannot compute on a device; empty if they can."""
    return _why_not(torch.device(device))


# `torch.compile` cannot trace the search for triton. This mark is what `torch.compiler.assume_constant_result` sets,
# which imports the compiler: that takes longer than the rest of the package.
why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _why_not(device: torch.device) -> str:
    if device.type != "cuda":
        return f"Triton kernels run on CUDA devices, not on {device}"
    reason = why_unavailable(str(device))
    if reason:
        return reason
    if torch.version.hip is not None:
        return "this torch is built for ROCm, and the kernels decode with instructions of NVIDIA's GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name, needed = torch.cuda.get_device_name(device), ".".join(map(str, MIN_CAPABILITY))
        return f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels need {needed}"
    return ""
