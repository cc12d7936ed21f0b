"""`moe_linear` by the native library (``minifloat_moe``): the tokens of all experts in one call."""

from __future__ import annotations

import ctypes

from torch import Tensor

from minifloat.kernels import native, threads
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.native.structs import STRUCTS, struct_of
from minifloat.kernels.pack.weight import Pointers

_MOE = struct_of(STRUCTS["moe_args"])


def run(
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
