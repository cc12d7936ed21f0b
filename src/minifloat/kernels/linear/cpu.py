"""`linear` by the native library (``csrc/linear``): packed weights, and several of them in one call.

What is here runs once per layer and token, so it does little: no object is made for the arguments but their bytes.
Shapes are validated by the caller, `minifloat.kernels.linear`; that memory holds packed weights, by `PackedWeight`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.errors import KernelUnavailable
from minifloat.kernels import native, threads

#: ``enum minifloat_dtype``.
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

#: ``struct minifloat_linear_args``.
_LINEAR = struct.Struct("@PPPPqqqiiii")


def run(x: Tensor, addresses: Sequence[int], biases: Sequence[Tensor | None] | None, rows: int) -> Tensor:
    """``x @ W.T + bias`` for several weights, their results side by side.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32, on the CPU, any strides.
        addresses: Where the packed weights ``[N_i, K]`` lie, all of one form.
        biases: None, or per weight None or ``[N_i]``, contiguous, all of one dtype of `DTYPES`.
        rows: The sum of N_i.

    Returns:
        ``[..., rows]``, the dtype of `x`.
    """
    shape = x.shape
    matrix = _matrix(x)
    y = x.new_empty((*shape[:-1], rows))
    count = len(addresses)
    pointers = ctypes.c_void_p * count
    weights = pointers(*addresses)
    bias_dtype, bias_pointers = 0, None
    if biases is not None:
        bias_dtype, bias_pointers = _bias_pointers(biases)
    library = native.load()
    if library is None:
        raise KernelUnavailable(native.why_unavailable())
    library.linear(
        _LINEAR.pack(
            ctypes.addressof(weights),
            0 if bias_pointers is None else ctypes.addressof(bias_pointers),
            matrix.data_ptr(),
            y.data_ptr(),
            matrix.stride(0),
            rows,
            matrix.shape[0],
            count,
            DTYPES[x.dtype],
            bias_dtype,
            threads.count(),
        )
    )
    return y


def _matrix(x: Tensor) -> Tensor:
    """`x` as ``[M, K]`` with contiguous rows; a copy only where its strides ask for one."""
    matrix = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _bias_pointers(biases: Sequence[Tensor | None]) -> tuple[int, ctypes.Array[ctypes.c_void_p] | None]:
    present = [bias for bias in biases if bias is not None]
    if not present:
        return 0, None
    pointers = (ctypes.c_void_p * len(biases))(*[None if bias is None else bias.data_ptr() for bias in biases])
    return DTYPES[present[0].dtype], pointers
