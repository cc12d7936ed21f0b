"""Quantizes the inputs of linears (W8A8): `round_inputs` for the CPU, `quantize_inputs` for GPUs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels import native, threads, triton_runtime
from minifloat.kernels.dtypes import DTYPES, has_kernel
from minifloat.kernels.native import CONSTANTS, STRUCTS, format_struct
from minifloat.numerics.activation import (
    check_activation,
    dequantize_activation,
    input_scales,
    quantize_activation,
)
from minifloat.numerics.cast import torch_dtype
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scale_rules import expand
from minifloat.numerics.scheme import ActivationSpec


def round_inputs(x: Tensor, spec: ActivationSpec, scale: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """Quantize an input and dequantize it: ``decode(encode(x / scale)) * scale`` in float32."""
    check_activation(spec, scale)
    if x.ndim == 0:
        raise ShapeError("x", "expected [..., K], got a scalar")
    reason = "" if impl == "reference" else _why_not_native(x, spec, scale)
    if native.runs("round_inputs", impl, reason):
        return _round_native(x, spec, scale) if spec.scale is FLOAT32 else _round_elements(x, spec, scale)
    return _round_in_torch(x, spec, scale)


def quantize_inputs(
    x: Tensor, spec: ActivationSpec, scale: Tensor | None = None, *, row_multiple: int = 1, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Quantize an input into codes and scales, for a product of codes."""
    check_activation(spec, scale)
    if spec.scale is not FLOAT32:
        raise UnsupportedTensorError(
            "x",
            f"no product here takes codes in {spec}: expected float32 scales; use round_inputs",
        )
    if x.ndim != 2:
        raise ShapeError("x", f"expected [M, K], got {list(x.shape)}")
    rows = -(-x.shape[0] // row_multiple) * row_multiple
    reason = "" if impl == "reference" else _why_not_triton(x, spec, scale)
    if native.runs("quantize_inputs", impl, reason, "triton"):
        from minifloat.kernels.inputs import triton

        codes, grid = triton.quantize_inputs(x, spec, scale, rows)
    else:
        codes, grid = _quantize_in_torch(x, spec, scale, rows)
    return codes.view(torch_dtype(spec.element)), grid


def _why_plain_torch(x: Tensor, scale: Tensor | None) -> str:
    """Return why no kernel takes the arguments: torch traces, or a gradient is required."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return f"it takes plain tensors and is not traced, got {type(x).__name__}"
    has_gradient = x.requires_grad or (scale is not None and scale.requires_grad)
    return "it has no gradient" if torch.is_grad_enabled() and has_gradient else ""


def _why_not_triton(x: Tensor, spec: ActivationSpec, scale: Tensor | None) -> str:
    dtype_reason = "" if x.dtype in DTYPES else f"it takes bfloat16, float16 and float32, got {x.dtype}"
    reason = _why_plain_torch(x, scale) or dtype_reason or triton_runtime.why_unavailable(str(x.device))
    if reason:
        return reason
    from minifloat.kernels.inputs import triton

    return triton.why_not(spec)


def _why_not_native(x: Tensor, spec: ActivationSpec, scale: Tensor | None) -> str:
    reason = _why_plain_torch(x, scale)
    if not reason and not has_kernel(x):
        return f"it takes bfloat16, float16 and float32 on the CPU, got {x.dtype} on {x.device}"
    return reason or ("" if native.load() is not None else native.why_unavailable())


def _round_elements(x: Tensor, spec: ActivationSpec, scale: Tensor | None) -> Tensor:
    """Round with scales of torch, which the library does not compute, and elements of the library."""
    tokens = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1]).float()
    scales = expand(input_scales(tokens, spec, scale), spec.granularity, (tokens.shape[0], tokens.shape[1]))
    unscaled = ActivationSpec(spec.element, TENSOR, dynamic=False)
    return _round_native(tokens / scales, unscaled, torch.ones(())).mul_(scales).reshape(x.shape)


def _round_native(x: Tensor, spec: ActivationSpec, scale: Tensor | None) -> Tensor:
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


def _round_in_torch(x: Tensor, spec: ActivationSpec, scale: Tensor | None) -> Tensor:
    """The reference of the native library."""
    return dequantize_activation(*quantize_activation(x, spec, scale), spec)


def _quantize_in_torch(x: Tensor, spec: ActivationSpec, scale: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    """The reference of the Triton kernel; `rows` is the number of rows of the codes."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))
    codes, grid = quantize_activation(padded, spec, scale)
    if spec.granularity == TENSOR:
        return codes, grid[:1, :1]
    return codes, grid.t().contiguous().t()
