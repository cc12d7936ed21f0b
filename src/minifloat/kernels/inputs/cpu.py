"""`round_inputs` by the native library (``csrc/quantize/inputs.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.kernels import native, threads
from minifloat.kernels.dtypes import DTYPES, has_kernel
from minifloat.kernels.native.structs import CONSTANTS, STRUCTS, format_struct
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scheme import ActivationSpec


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
    scaling = "GIVEN" if static_scale is not None else "TENSOR" if spec.granularity == TENSOR else "BLOCK"
    args = STRUCTS["round_inputs_args"](
        x=rows.data_ptr(),
        scale=None if static_scale is None else static_scale.data_ptr(),
        y=y.data_ptr(),
        rows=rows.shape[0],
        cols=rows.shape[1],
        x_stride=rows.stride(0),
        block_cols=spec.granularity.cols or rows.shape[1],
        element=format_struct(spec.element),
        dtype=DTYPES[x.dtype],
        scaling=CONSTANTS[f"INPUT_{scaling}"],
        zero_scale=2.0**-FLOAT32.mantissa_bits,
        threads=threads.count(),
    )
    library.call("round_inputs", args)
    return y
