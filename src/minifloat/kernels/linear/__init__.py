"""`linear`: activations in 16 or 32 bits times a quantized weight, without a 16-bit copy of the weight in memory.

Serving holds weights in their quantized form and multiplies through this op only, so that a faster implementation
changes nothing but speed. Activations are not quantized here: a W8A8 checkpoint is computed weight-only.
"""

from __future__ import annotations

from torch import Tensor

from minifloat.errors import KernelUnavailable, ShapeError, UnsupportedTensorError
from minifloat.kernels.linear import reference
from minifloat.quantize.tensor import QuantizedTensor

__all__ = ["IMPLEMENTATIONS", "linear"]

#: What `impl` may be, besides "auto".
IMPLEMENTATIONS = ("reference",)


def linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """``x @ weight.T + bias`` in the dtype of `x`.

    The weight is decoded and scaled in float32 and rounded once to the dtype of `x`; the product is then the one of
    `torch.nn.functional.linear` in that dtype. With float32 `x` nothing is rounded before the product; with 16 bits
    the result is that of a 16-bit model whose weights are the dequantized ones, which is what servers compute.

    Args:
        x: ``[..., K]``, floating.
        weight: A weight ``[N, K]``.
        bias: ``[N]``, the dtype of `x`.
        impl: "auto", or one of `IMPLEMENTATIONS`.

    Returns:
        ``[..., N]``, the dtype of `x`. NaN and Inf in `x` spread as in any matrix product.

    Raises:
        KernelUnavailable: `impl` cannot run here.
        ShapeError: `x` or `bias` does not fit the weight.
        UnsupportedTensorError: `x` is not floating.
    """
    rows, cols = weight.shape
    if x.ndim == 0 or x.shape[-1] != cols:
        raise ShapeError("x", f"expected [..., {cols}] for a weight {rows}x{cols}, got {list(x.shape)}")
    if not x.is_floating_point():
        raise UnsupportedTensorError("x", f"expected a floating dtype, got {x.dtype}")
    if bias is not None and tuple(bias.shape) != (rows,):
        raise ShapeError("bias", f"expected [{rows}] for a weight {rows}x{cols}, got {list(bias.shape)}")
    if impl in ("auto", "reference"):
        return reference.linear(x, weight, bias)
    raise KernelUnavailable(f"linear has no implementation {impl!r}; available: auto, {', '.join(IMPLEMENTATIONS)}")
