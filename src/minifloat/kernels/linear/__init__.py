"""`linear`: an input times a quantized weight, without a 16-bit copy of the weight in memory.

Serving holds weights in their quantized form and multiplies through this op only, so that a faster implementation
changes nothing but speed. The input stays in 16 or 32 bits (weight-only, W8A16) or is quantized first (W8A8), where the
checkpoint says that servers do so.
"""

from __future__ import annotations

from torch import Tensor

from minifloat.errors import KernelUnavailable, ShapeError, UnsupportedTensorError
from minifloat.kernels.linear import reference
from minifloat.quantize.activation import can_quantize, describe_activation
from minifloat.quantize.tensor import QuantizedTensor
from minifloat.scheme import ActivationSpec

__all__ = ["IMPLEMENTATIONS", "linear"]

#: What `impl` may be, besides "auto".
IMPLEMENTATIONS = ("reference",)


def linear(
    x: Tensor,
    weight: QuantizedTensor,
    bias: Tensor | None = None,
    *,
    impl: str = "auto",
    activation: ActivationSpec | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias`` in the dtype of `x`.

    Weight-only (no `activation`): the weight is decoded and scaled in float32 and rounded once to the dtype of `x`;
    the product is then the one of `torch.nn.functional.linear` in that dtype. With float32 `x` nothing is rounded
    before the product; with 16 bits the result is that of a 16-bit model whose weights are the dequantized ones, which
    is what servers compute.

    W8A8: `x` is quantized by `minifloat.quantize.activation`, both sides are dequantized to float32, multiplied and
    summed in float32, the bias is added in float32, and the sum is rounded once to the dtype of `x`. Servers multiply
    the codes, which is exact in float32, and apply the scales after the sum (per block of 128 columns for blocks);
    here they are applied before it. The two, and the order of summation, differ by float32 rounding only, 2**-24 of
    the largest partial sum per addition: far below the half step of E4M3, 2**-4, that quantizing costs. Tensor cores
    that keep fewer bits while they sum (Hopper's keep about 14) are not imitated, and a caller who allows TF32 on a
    GPU has its 10 bits here too.

    Args:
        x: ``[..., K]``, floating.
        weight: A weight ``[N, K]``.
        bias: ``[N]``, the dtype of `x`.
        impl: "auto", or one of `IMPLEMENTATIONS`.
        activation: How `x` is quantized; None: not at all.
        input_scale: float32, one element; given exactly where `activation` is static.

    Returns:
        ``[..., N]``, the dtype of `x`. NaN in `x` spreads as in any matrix product, and so does Inf, except that a
        static `input_scale` clamps it.

    Raises:
        KernelUnavailable: `impl` cannot run here.
        ShapeError: `x` or `bias` does not fit the weight.
        UnsupportedTensorError: `x` is not floating, or inputs of this kind are not simulated (MX and NVFP4).
        ValueError: `input_scale` is missing, or given where the scale is dynamic.

    Source: vLLM, `cutlass_scaled_mm` and its block form; DeepSeek-V3 report, section 3.3.2, for Hopper's 14 bits.
    """
    rows, cols = weight.shape
    if x.ndim == 0 or x.shape[-1] != cols:
        raise ShapeError("x", f"expected [..., {cols}] for a weight {rows}x{cols}, got {list(x.shape)}")
    if not x.is_floating_point():
        raise UnsupportedTensorError("x", f"expected a floating dtype, got {x.dtype}")
    if bias is not None and tuple(bias.shape) != (rows,):
        raise ShapeError("bias", f"expected [{rows}] for a weight {rows}x{cols}, got {list(bias.shape)}")
    if impl not in ("auto", "reference"):
        raise KernelUnavailable(f"linear has no implementation {impl!r}; available: auto, {', '.join(IMPLEMENTATIONS)}")
    if activation is None:
        return reference.linear(x, weight, bias)
    if not can_quantize(activation, weight.spec):
        raise UnsupportedTensorError(
            "x",
            f"inputs in {describe_activation(activation)} are not simulated for weights in {weight.spec.element.name} "
            f"with {weight.spec.scale.name} scales; such weights run weight-only",
        )
    return reference.quantized_linear(x, weight, bias, activation, input_scale)
