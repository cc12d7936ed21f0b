"""Quantizes the inputs of linears (W8A8): `round_inputs` for the CPU, `quantize_inputs` for GPUs.

A linear with packed weights calls `round_inputs` if the checkpoint declares quantized inputs. Plain torch takes a dozen
passes over the input, several times the cost of the product; the native library takes one. The CPU multiplies the
rounded values; a GPU multiplies codes, and gets codes and scales from `quantize_inputs`. The inputs of MXFP8, MXFP4 and
NVFP4, whose scales are no float32 numbers, are rounded in plain torch only.
"""

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
    """Quantize an input and dequantize it: ``decode(encode(x / scale)) * scale`` in float32.

    Every implementation gives the bits of `minifloat.numerics.activation` (except the payload of NaN), on every
    instruction set and with any number of threads. The native library follows IEEE 754 even if the caller lets torch
    flush subnormal numbers.

    Args:
        x: ``[..., K]``, floating, any strides (contiguous rows need no copy).
        spec: As in `minifloat.numerics.activation.quantize_activation`.
        scale: float32, one positive element, if `spec` needs a static scale or a divisor; else None.
        impl: "auto" (the native library if it is loaded and takes `x`: bfloat16, float16 or float32 on the CPU, no
            gradient required, not traced, `spec` with float32 scales), "reference" or "cpu".

    Returns:
        float32, the shape of `x`, contiguous. With a dynamic scale, NaN or Inf in a block makes all of it NaN; with a
        static one Inf is clamped, and NaN stays NaN; under NVFP4's divisor Inf is clamped, and NaN makes its block NaN.
    """
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
    """Quantize an input into codes and scales, for a product of codes.

    Every implementation gives the bits of `minifloat.numerics.activation.quantize_activation`.

    Args:
        x: ``[M, K]``, floating, any strides (contiguous rows need no copy).
        spec: As in `round_inputs`, with float32 scales.
        scale: As in `round_inputs`.
        row_multiple: Rows of zeros are appended up to a multiple of this number.
        impl: "auto" (Triton on a CUDA device, unless torch traces or a gradient is required), "reference" or "triton".

    Returns:
        Codes ``[M', K]`` in the dtype of the element, contiguous, and float32 scales: ``[1, 1]`` of the tensor, or
        ``[M', groups]``, column-major. The scales of appended rows are arbitrary positive numbers.
    """
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
