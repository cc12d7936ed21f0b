"""Which floats the kernels of the CPU read and write: one table for all ops that take tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.errors import UnsupportedTensorError

#: ``enum minifloat_dtype``.
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def has_kernel(tensor: Tensor) -> bool:
    """Whether there are kernels for a tensor's dtype and device."""
    return tensor.dtype in DTYPES and tensor.is_cpu


def unsupported(name: str, tensor: Tensor) -> UnsupportedTensorError:
    """The error for a tensor that there is no kernel for."""
    found = f"{tensor.dtype} on {tensor.device}"
    return UnsupportedTensorError(name, f"expected bfloat16, float16 or float32 on the CPU, got {found}")
