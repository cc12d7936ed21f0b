"""Linear layers that hold a quantized weight, in the place of `torch.nn.Linear` inside a transformers model.

Left out: gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minifloat.kernels.linear import linear
from minifloat.quantize.activation import describe_activation
from minifloat.quantize.tensor import QuantizedTensor
from minifloat.scheme import ActivationSpec


class QuantizedWeight(nn.Module):
    """Codes and scales of one weight ``[N, K]`` and of its input, which move with a model and never change dtype.

    ``model.half()`` or ``model.to(torch.bfloat16)`` would round float32 scales; here such a call changes `dtype` alone.

    Attributes:
        codes: uint8, as in `QuantizedTensor`.
        scale: The scale grid.
        global_scale: float32 scalar or None.
        activation: How inputs are quantized before they are multiplied; None: not at all.
        input_scale: float32 scalar where `activation` is static, else None.
        dtype: The dtype that the weight stands for in the model, which `weight` has.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None
    input_scale: Tensor | None

    def __init__(
        self,
        quantized: QuantizedTensor,
        dtype: torch.dtype,
        activation: ActivationSpec | None = None,
        input_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.spec = quantized.spec
        self.shape = quantized.shape
        self.global_divides = quantized.global_divides
        self.dtype = dtype
        self.register_buffer("codes", quantized.codes)
        self.register_buffer("scale", quantized.scale)
        self.register_buffer("global_scale", quantized.global_scale)
        self.register_buffer("input_scale", input_scale)

    @property
    def quantized(self) -> QuantizedTensor:
        """The weight as kernels take it; shares the memory of this module."""
        return QuantizedTensor(self.spec, self.shape, self.codes, self.scale, self.global_scale, self.global_divides)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight ``[N, K]`` in `dtype`, made anew at every access.

        It is no parameter: nothing trains it, ties it or saves it. It exists because some models read
        ``linear.weight`` outside of the linear's forward: Mamba's ``lm_head.weight.dtype``, T5's ``wo.weight.dtype``,
        the routers and latent-attention projections that multiply with it directly.
        """
        return self.quantized.dequantize(self.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None = None, impl: str = "auto") -> Tensor:
        """``x @ weight.T + bias``, ``[..., K]`` to ``[..., N]``, the dtype of `x`, which `activation` may quantize."""
        return linear(x, self.quantized, bias, impl=impl, activation=self.activation, input_scale=self.input_scale)

    def extra_repr(self) -> str:
        """Shape, element format, granularity and scale format, and how inputs are quantized."""
        rows, cols = self.shape
        inputs = "" if self.activation is None else f", inputs {describe_activation(self.activation)}"
        spec = self.spec
        return f"[{rows}, {cols}], {spec.element.name}, {spec.granularity}, {spec.scale.name} scales{inputs}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedWeight:
        """Let `fn` move the codes and scales, but cast only what is not quantized (a bias)."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.codes.device)).dtype
        held = {id(buffer) for buffer in self._buffers.values()}

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) not in held or moved.dtype == tensor.dtype:
                return moved
            return tensor.to(moved.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self


class QuantizedLinear(QuantizedWeight):
    """A linear layer whose weight stays quantized: ``y = x @ weight.T + bias`` by `minifloat.kernels.linear`.

    Attributes:
        in_features: K.
        out_features: N.
        bias: ``[N]`` in the model's dtype, or None.
        impl: Which kernel computes it.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        quantized: QuantizedTensor,
        dtype: torch.dtype,
        activation: ActivationSpec | None = None,
        input_scale: Tensor | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__(quantized, dtype, activation, input_scale)
        self.out_features, self.in_features = quantized.shape
        self.impl = impl
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K]`` to ``[..., N]``, the dtype of `x`."""
        return self.multiply(x, self.bias, self.impl)

    def extra_repr(self) -> str:
        """As `torch.nn.Linear`, with the formats."""
        return f"{super().extra_repr()}, bias={self.bias is not None}"
