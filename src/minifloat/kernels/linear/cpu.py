"""`linear` by the native library (``csrc/linear``): packed weights, and several of them in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels import native, threads
from minifloat.kernels.dtypes import DTYPES, has_kernel, unsupported
from minifloat.kernels.native import STRUCTS, struct_of
from minifloat.kernels.pack import Pointers

_LINEAR = struct_of(STRUCTS["linear_args"])
_MOE = struct_of(STRUCTS["moe_args"])


def check(x: Tensor, cols: int, rows: Sequence[int], biases: Sequence[Tensor | None] | None) -> None:
    if not has_kernel(x):
        raise unsupported("x", x)
    if x.ndim == 0 or x.shape[-1] != cols:
        raise ShapeError("x", f"expected [..., {cols}] for a weight {sum(rows)}x{cols}, got {list(x.shape)}")
    if biases is None:
        return
    if len(biases) != len(rows):
        raise ShapeError("biases", f"expected one for each of {len(rows)} weights, got {len(biases)}")
    present = None
    for bias, n in zip(biases, rows, strict=True):
        if bias is None:
            continue
        if bias.shape != (n,):
            raise ShapeError("bias", f"expected [{n}] for a weight {n}x{cols}, got {list(bias.shape)}")
        if not has_kernel(bias):
            raise unsupported("bias", bias)
        if present is not None and bias.dtype != present:
            raise UnsupportedTensorError("biases", f"expected one dtype, got {present}, {bias.dtype}")
        present = bias.dtype


def run(x: Tensor, pointers: Pointers, biases: Sequence[Tensor | None] | None, int8_inputs: bool = False) -> Tensor:
    """Compute ``x @ W.T + bias`` for several weights, their results side by side."""
    library = native.require()
    shape, rows = x.shape, pointers.total
    if x.is_contiguous():
        stride, m = pointers.cols, x.numel() // pointers.cols
    else:
        x = _matrix(x)
        stride, m = x.stride(0), x.shape[0]
    y = x.new_empty((*shape[:-1], rows))
    bias_address, bias_dtype = 0, 0
    if biases is not None:
        addresses: list[int | None] = []
        copies = []  # keeps contiguous copies alive until the call returns
        for bias in biases:
            if bias is None:
                addresses.append(None)
                continue
            readable = bias if bias.is_contiguous() else bias.contiguous()
            copies.append(readable)
            addresses.append(readable.data_ptr())
            bias_dtype = DTYPES[bias.dtype]
        table = (ctypes.c_void_p * len(addresses))(*addresses)
        bias_address = ctypes.addressof(table)
    dtype = DTYPES[x.dtype]
    library.call(
        "linear",
        _LINEAR.pack(
            pointers.address,
            bias_address,
            x.data_ptr(),
            y.data_ptr(),
            stride,
            rows,
            m,
            pointers.count,
            dtype,
            bias_dtype,
            threads.count(),
            int8_inputs,
            False,  # batch_invariant, of decoders
        ),
    )
    return y


def _matrix(x: Tensor) -> Tensor:
    """Return `x` as ``[M, K]`` with contiguous rows, copied only if its strides require it."""
    matrix = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def run_experts(
    x: Tensor,
    pointers: Pointers,
    offsets: Tensor,
    x_rows: Tensor | None,
    biases: Tensor | None,
    int8_inputs: bool = False,
) -> Tensor:
    """Compute rows t: row ``x_rows[t]`` of `x` times the expert e with ``offsets[e] <= t < offsets[e + 1]``."""
    library = native.require()
    matrix = x if x.stride(1) == 1 else x.contiguous()
    rows = pointers.rows[0]
    y = x.new_empty((x.shape[0] if x_rows is None else x_rows.shape[0], rows))
    count = pointers.count
    bias_pointers, bias_dtype = None, 0
    if biases is not None:
        step = biases.stride(0) * biases.element_size()
        first = biases.data_ptr()
        bias_pointers = (ctypes.c_void_p * count)(*[first + step * expert for expert in range(count)])
        bias_dtype = DTYPES[biases.dtype]
    library.call(
        "moe",
        _MOE.pack(
            pointers.address,
            0 if bias_pointers is None else ctypes.addressof(bias_pointers),
            offsets.data_ptr(),
            0 if x_rows is None else x_rows.data_ptr(),
            matrix.data_ptr(),
            y.data_ptr(),
            matrix.stride(0),
            rows,
            count,
            DTYPES[x.dtype],
            bias_dtype,
            threads.count(),
            int8_inputs,
            False,  # batch_invariant, of decoders
        ),
    )
    return y
