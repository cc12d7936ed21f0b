"""The float dtypes that the CPU kernels read and write."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.errors import UnsupportedTensorError
from minifloat.kernels.native import CONSTANTS

#: ``enum minifloat_dtype``.
DTYPES = {torch.bfloat16: CONSTANTS["BF16"], torch.float16: CONSTANTS["F16"], torch.float32: CONSTANTS["F32"]}


def has_kernel(tensor: Tensor) -> bool:
    return tensor.dtype in DTYPES and tensor.is_cpu


def unsupported(name: str, tensor: Tensor) -> UnsupportedTensorError:
    expected = "bfloat16, float16 or float32 on the CPU"
    return UnsupportedTensorError(name, f"expected {expected}, got {tensor.dtype} on {tensor.device}")
