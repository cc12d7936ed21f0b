"""`round_inputs`: the inputs of a linear as a server with quantized inputs (W8A8) sees them, in float32.

A linear with packed weights runs through it once per call where the checkpoint declares such inputs. Plain torch takes
a dozen passes over the input for that, several times what the product itself costs; the native library takes one.
Left out: the codes and scales themselves, which nobody multiplies here (`minifloat.quantize.activation` gives them).
"""

from __future__ import annotations

from torch import Tensor

from minifloat.errors import KernelUnavailable, ShapeError
from minifloat.kernels.inputs import cpu, reference
from minifloat.quantize.activation import check_activation
from minifloat.scheme import ActivationSpec

__all__ = ["IMPLEMENTATIONS", "round_inputs"]

#: What `impl` may be, besides "auto".
IMPLEMENTATIONS = ("reference", "cpu")


def round_inputs(x: Tensor, spec: ActivationSpec, scale: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """Quantize an input and dequantize it: ``decode(encode(x / scale)) * scale`` in float32.

    Every implementation gives the same bits, those of `minifloat.quantize.activation` (of NaN, the payload aside), on
    every instruction set and with any number of threads. The native one computes as IEEE 754 has it also where the
    caller lets torch flush subnormal numbers.

    Args:
        x: ``[..., K]``, floating, any strides; rows that are contiguous need no copy.
        spec: E4M3; per tensor (static or dynamic), per token or per group of columns (dynamic). The last group of a
            row may be partial.
        scale: float32, one positive element; given exactly where `spec` is static.
        impl: "auto" (the native library where it is loaded and `x` is one that it takes: bfloat16, float16 or float32
            on the CPU, no gradient asked for, nothing tracing), "reference" or "cpu".

    Returns:
        float32, the shape of `x`, contiguous. With a dynamic scale, NaN or Inf in a block makes all of it NaN; with a
        static one Inf is clamped, and NaN stays NaN.

    Raises:
        KernelUnavailable: `impl` cannot run here, or is none.
        ShapeError: `x` has no dimensions.
        UnsupportedTensorError: Another element or granularity.
        ValueError: `scale` is given for a dynamic spec or missing for a static one.
    """
    if impl not in ("auto", *IMPLEMENTATIONS):
        known = f"auto, {', '.join(IMPLEMENTATIONS)}"
        raise KernelUnavailable(f"round_inputs has no implementation {impl!r}; available: {known}")
    check_activation(spec, scale)
    if x.ndim == 0:
        raise ShapeError("x", "expected [..., K], got a scalar")
    if impl == "reference":
        return reference.round_inputs(x, spec, scale)
    reason = cpu.why_not(x, scale)
    if not reason:
        return cpu.round_inputs(x, spec, scale)
    if impl == "cpu":
        raise KernelUnavailable(f"round_inputs(impl='cpu') cannot run: {reason}")
    return reference.round_inputs(x, spec, scale)
