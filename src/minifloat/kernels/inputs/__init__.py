"""Quantizes the inputs of linears (W8A8): `round_inputs` for the CPU, `quantize_inputs` for GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.errors import KernelUnavailable, ShapeError, UnsupportedTensorError
from minifloat.kernels import triton_runtime
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.inputs import cpu, reference
from minifloat.numerics.activation import check_activation, describe_activation
from minifloat.numerics.cast import torch_dtype
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.scheme import ActivationSpec

__all__ = ["IMPLEMENTATIONS", "quantize_inputs", "round_inputs"]

#: Values of `impl` besides "auto".
IMPLEMENTATIONS = ("reference", "cpu")


def round_inputs(x: Tensor, spec: ActivationSpec, scale: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """Quantize an input and dequantize it: ``decode(encode(x / scale)) * scale`` in float32."""
    if impl not in ("auto", *IMPLEMENTATIONS):
        known = f"auto, {', '.join(IMPLEMENTATIONS)}"
        raise KernelUnavailable(f"round_inputs has no implementation {impl!r}; available: {known}")
    check_activation(spec, scale)
    if x.ndim == 0:
        raise ShapeError("x", "expected [..., K], got a scalar")
    if impl == "reference":
        return reference.round_inputs(x, spec, scale)
    reason = cpu.why_not(x, spec, scale)
    if not reason:
        return cpu.round_inputs(x, spec, scale)
    if impl == "cpu":
        raise KernelUnavailable(f"round_inputs(impl='cpu') cannot run: {reason}")
    return reference.round_inputs(x, spec, scale)


def quantize_inputs(
    x: Tensor, spec: ActivationSpec, scale: Tensor | None = None, *, row_multiple: int = 1, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Quantize an input into codes and scales, for a product of codes."""
    if impl not in ("auto", "reference", "triton"):
        raise KernelUnavailable(f"quantize_inputs has no implementation {impl!r}; available: auto, reference, triton")
    check_activation(spec, scale)
    if spec.scale is not FLOAT32:
        raise UnsupportedTensorError(
            "x",
            f"no product here takes codes in {describe_activation(spec)}: expected float32 scales; use round_inputs",
        )
    if x.ndim != 2:
        raise ShapeError("x", f"expected [M, K], got {list(x.shape)}")
    rows = -(-x.shape[0] // row_multiple) * row_multiple
    reason = "" if impl == "reference" else _why_not_triton(x, spec, scale)
    if reason and impl == "triton":
        raise KernelUnavailable(f"quantize_inputs(impl='triton') cannot run: {reason}")
    if reason or impl == "reference":
        codes, grid = reference.quantize_inputs(x, spec, scale, rows)
    else:
        from minifloat.kernels.inputs import triton

        codes, grid = triton.quantize_inputs(x, spec, scale, rows)
    return codes.view(torch_dtype(spec.element)), grid


def _why_not_triton(x: Tensor, spec: ActivationSpec, scale: Tensor | None) -> str:
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return f"it takes plain tensors and is not traced, got {type(x).__name__}"
    if torch.is_grad_enabled() and (x.requires_grad or (scale is not None and scale.requires_grad)):
        return "it has no gradient"
    if x.dtype not in DTYPES:
        return f"it takes bfloat16, float16 and float32, got {x.dtype}"
    reason = triton_runtime.why_unavailable(str(x.device))
    if reason:
        return reason
    from minifloat.kernels.inputs import triton

    return triton.why_not(spec)
