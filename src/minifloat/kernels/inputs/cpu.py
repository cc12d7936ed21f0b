"""`round_inputs` by the native library (``csrc/quantize/inputs.cpp``).

Every number about a format comes from `numerics/formats.py`; the C++ code holds none. The caller,
`minifloat.kernels.inputs`, validates the arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.kernels import native, threads
from minifloat.kernels.dtypes import DTYPES, has_kernel
from minifloat.kernels.native import structs
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scheme import ActivationSpec

#: ``enum minifloat_input_scaling``.
_STATIC, _OF_TENSOR, _OF_BLOCK = 0, 1, 2


def why_not(x: Tensor, spec: ActivationSpec, scale: Tensor | None) -> str:
    """Return why the native library cannot run here or does not take `x` or `spec`; empty if it can."""
    if spec.scale is not FLOAT32:
        return f"it computes float32 scales, not {spec.scale.name} scales"
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return f"it takes plain tensors and is not traced, got {type(x).__name__}"
    if torch.is_grad_enabled() and (x.requires_grad or (scale is not None and scale.requires_grad)):
        return "it has no gradient"
    if not has_kernel(x):
        return f"it takes bfloat16, float16 and float32 on the CPU, got {x.dtype} on {x.device}"
    return "" if native.load() is not None else native.why_unavailable()


def round_inputs(x: Tensor, spec: ActivationSpec, scale: Tensor | None) -> Tensor:
    """Implement `minifloat.kernels.inputs.round_inputs` for inputs that `why_not` accepts."""
    library = native.require()
    y = torch.empty(x.shape, dtype=torch.float32)
    if y.numel() == 0:
        return y
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    static_scale = None if scale is None else scale.detach().to("cpu", torch.float32).reshape(())
    element = spec.element
    args = structs.RoundInputsArgs(
        x=rows.data_ptr(),
        scale=None if static_scale is None else static_scale.data_ptr(),
        y=y.data_ptr(),
        rows=rows.shape[0],
        cols=rows.shape[1],
        x_stride=rows.stride(0),
        block_cols=spec.granularity.cols or rows.shape[1],
        element=structs.Format(element.bits, element.mantissa_bits, element.emin, element.max),
        dtype=DTYPES[x.dtype],
        scaling=_STATIC if static_scale is not None else _OF_TENSOR if spec.granularity == TENSOR else _OF_BLOCK,
        zero_scale=2.0**-FLOAT32.mantissa_bits,
        threads=threads.count(),
    )
    library.round_inputs(args)
    return y
