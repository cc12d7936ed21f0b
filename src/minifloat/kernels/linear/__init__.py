"""`linear` multiplies an input with a quantized weight, without a 16-bit copy of the weight in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.errors import KernelUnavailable, ShapeError, UnsupportedTensorError
from minifloat.kernels import native, ops
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.inputs import round_inputs
from minifloat.kernels.linear import cpu, int8, reference, scaled_mm
from minifloat.kernels.linear import triton as gpu
from minifloat.kernels.linear.triton import GpuWeight, why_unavailable
from minifloat.kernels.pack import FusedWeights, PackedWeight
from minifloat.numerics.activation import can_quantize
from minifloat.numerics.scheme import ActivationSpec
from minifloat.numerics.tensor import QuantizedTensor

__all__ = ["IMPLEMENTATIONS", "FusedWeights", "GpuWeight", "linear", "linear_fused"]

#: Values of `impl` besides "auto".
IMPLEMENTATIONS = ("reference", "cpu", "triton", "scaled_mm")


def linear(
    x: Tensor,
    weight: QuantizedTensor | PackedWeight | GpuWeight,
    bias: Tensor | None = None,
    *,
    impl: str = "auto",
    activation: ActivationSpec | None = None,
    input_scale: Tensor | None = None,
    int8_inputs: bool = False,
) -> Tensor:
    """Compute ``x @ weight.T + bias`` in the dtype of `x`."""
    if int8_inputs and activation is not None:
        raise ValueError("int8_inputs and activation exclude each other: both say how x is rounded")
    packed = None if impl == "scaled_mm" else _packed(weight, impl)
    if packed is not None and activation is None:
        return _multiply_one(x, packed, bias, int8_inputs)
    _check_shapes(x, weight.shape, bias)
    if activation is None:
        if impl == "scaled_mm":
            raise KernelUnavailable("linear(impl='scaled_mm') multiplies quantized inputs: give an activation")
        multiply = int8.linear if int8_inputs else reference.linear
        return multiply(x, _unpacked(weight), bias)
    spec = weight.spec
    if spec is None or not can_quantize(activation, spec):
        weights = "BF16" if spec is None else f"{spec.element.name} with {spec.scale.name} scales"
        raise UnsupportedTensorError(
            "x",
            f"inputs in {activation} are not simulated for weights in {weights}; such weights run weight-only",
        )
    if packed is None:
        stored = _unpacked(weight)
        if isinstance(stored, QuantizedTensor) and _use_scaled_mm(x, stored, activation, impl):
            return scaled_mm.quantized_linear(x, stored, bias, activation, input_scale)
        return reference.quantized_linear(x, stored, bias, activation, input_scale)
    return _multiply_one(round_inputs(x, activation, input_scale), packed, bias).to(x.dtype)


def linear_fused(
    x: Tensor,
    weights: Sequence[PackedWeight] | Sequence[GpuWeight],
    biases: Sequence[Tensor | None] | None = None,
    *,
    int8_inputs: bool = False,
) -> tuple[Tensor, ...]:
    """Multiply one input with several weights in one call: q, k and v, or gate and up."""
    on_gpu = [weight for weight in weights if isinstance(weight, GpuWeight)]
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if on_gpu and packed:
        raise UnsupportedTensorError("weights", "some are packed for the CPU and some for a GPU; expected one device")
    if on_gpu:
        return _multiply_on_gpu(x, on_gpu, biases, int8_inputs)
    if native.load() is None:
        raise KernelUnavailable(f"linear_fused cannot run: {native.why_unavailable()}")
    fused = weights if isinstance(weights, FusedWeights) else FusedWeights(packed)
    y = _multiply(x, fused, biases, int8_inputs)
    return torch.split_with_sizes(y, fused.rows, -1)


def _packed(weight: QuantizedTensor | PackedWeight | GpuWeight, impl: str) -> PackedWeight | GpuWeight | None:
    """Return the weight if a kernel multiplies it as it is packed, None if the reference multiplies it."""
    if impl == "auto":
        if isinstance(weight, GpuWeight):
            return None if why_unavailable(weight.codes.device) else weight
        return weight if isinstance(weight, PackedWeight) and native.load() is not None else None
    if impl == "reference":
        return None
    if impl not in IMPLEMENTATIONS:
        raise KernelUnavailable(f"linear has no implementation {impl!r}; available: auto, {', '.join(IMPLEMENTATIONS)}")
    packed_for: type[PackedWeight | GpuWeight] = PackedWeight if impl == "cpu" else GpuWeight
    if not isinstance(weight, packed_for):
        how = "kernels.pack" if impl == "cpu" else "kernels.linear.triton.pack"
        raise KernelUnavailable(f"linear(impl={impl!r}) multiplies packed weights: pack this one, once, with {how}")
    reason = why_unavailable(weight.codes.device) if isinstance(weight, GpuWeight) else native.why_unavailable()
    if reason:
        raise KernelUnavailable(f"linear(impl={impl!r}) cannot run: {reason}")
    return weight


def _use_scaled_mm(x: Tensor, weight: QuantizedTensor, activation: ActivationSpec, impl: str) -> bool:
    """Return whether `scaled_mm` multiplies quantized inputs: on a GPU if it can, elsewhere only if `impl` names it."""
    if impl != "scaled_mm" and (impl != "auto" or not x.is_cuda):
        return False
    dtype_reason = f"it takes bfloat16, float16 and float32, got {x.dtype}" if x.dtype not in DTYPES else ""
    reason = dtype_reason or scaled_mm.why_not(weight, activation)
    if reason and impl == "scaled_mm":
        raise KernelUnavailable(f"linear(impl='scaled_mm') cannot run: {reason}")
    return not reason


def _unpacked(weight: QuantizedTensor | PackedWeight | GpuWeight) -> QuantizedTensor | Tensor:
    return weight if isinstance(weight, QuantizedTensor) else weight.unpack()


def _multiply_one(
    x: Tensor, weight: PackedWeight | GpuWeight, bias: Tensor | None, int8_inputs: bool = False
) -> Tensor:
    if isinstance(weight, PackedWeight):
        return _multiply(x, weight, None if bias is None else (bias,), int8_inputs)
    if int8_inputs:
        raise KernelUnavailable(
            "int8_inputs needs weights packed for the CPU; on a GPU no kernel rounds inputs to int8"
        )
    if not ops.is_eager(x, (bias,)):
        return gpu.traced(x, weight, bias)
    gpu.check(x, weight, bias)
    return gpu.run(x, weight, bias)


def _multiply_on_gpu(
    x: Tensor, weights: Sequence[GpuWeight], biases: Sequence[Tensor | None] | None, int8_inputs: bool
) -> tuple[Tensor, ...]:
    reason = why_unavailable(weights[0].codes.device)
    if reason:
        raise KernelUnavailable(f"linear_fused cannot run: {reason}")
    if biases is not None and len(biases) != len(weights):
        raise ShapeError("biases", f"expected one for each of {len(weights)} weights, got {len(biases)}")
    return tuple(
        _multiply_one(x, weight, bias, int8_inputs)
        for weight, bias in zip(weights, biases or [None] * len(weights), strict=True)
    )


def _multiply(
    x: Tensor,
    weight: PackedWeight | FusedWeights,
    biases: Sequence[Tensor | None] | None,
    int8_inputs: bool = False,
) -> Tensor:
    if ops.is_eager(x, biases):
        pointers = weight.pointers
        cpu.check(x, pointers.cols, pointers.rows, biases)
        return cpu.run(x, pointers, biases, int8_inputs)
    weights = [weight] if isinstance(weight, PackedWeight) else list(weight)
    rows = [each.shape[0] for each in weights]
    cpu.check(x, weights[0].shape[1], rows, biases)
    y: Tensor = torch.ops.minifloat.linear(x, [each.data for each in weights], list(biases or ()), rows, int8_inputs)
    return y


def _check_shapes(x: Tensor, shape: tuple[int, int], bias: Tensor | None) -> None:
    rows, cols = shape
    if x.ndim == 0 or x.shape[-1] != cols:
        raise ShapeError("x", f"expected [..., {cols}] for a weight {rows}x{cols}, got {list(x.shape)}")
    if not x.is_floating_point():
        raise UnsupportedTensorError("x", f"expected a floating dtype, got {x.dtype}")
    if bias is not None and tuple(bias.shape) != (rows,):
        raise ShapeError("bias", f"expected [{rows}] for a weight {rows}x{cols}, got {list(bias.shape)}")
