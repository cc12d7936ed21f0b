"""`linear` multiplies an input with a quantized weight, without a 16-bit copy of the weight in memory.

Serving keeps weights quantized and multiplies through this op only. The input stays in 16 or 32 bits (weight-only,
W8A16), or is quantized first (W8A8) if the checkpoint declares quantized activations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.errors import KernelUnavailable, ShapeError, UnsupportedTensorError
from minifloat.kernels import native, ops
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.inputs import round_inputs
from minifloat.kernels.linear import cpu, int8_reference, reference, scaled_mm
from minifloat.kernels.linear.triton import GpuWeight, why_unavailable
from minifloat.kernels.linear.triton import op as gpu
from minifloat.kernels.pack import FusedWeights, PackedWeight
from minifloat.numerics.activation import can_quantize, describe_activation
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
    """Compute ``x @ weight.T + bias`` in the dtype of `x`.

    Weight-only (no `activation`), packed weights: the weight is exactly the product of its codes and scales, sum and
    bias are float32, and the result is rounded once to the dtype of `x`. The bits do not depend on the number of
    threads, but on the instruction set, and those of a row of `x` also on the number of rows (not for some weights, and
    not in a decoder with `Decoder.batch_invariant`). On a GPU the same holds, and the bits depend on the device and on
    M; but above some hundred rows of `x` (512 on Hopper) the weight is decoded once into memory, rounded to the dtype
    of `x`, as in the reference.

    Weight-only, not packed (the reference): the weight is decoded and scaled in float32 and rounded once to the dtype
    of `x`; the product is that of `torch.nn.functional.linear` in this dtype. With float32 `x` nothing is rounded
    before the product; with 16 bits the result is that of a 16-bit model with the dequantized weights, which is what
    servers compute.

    W8A8, W4A8 and W4A4: `x` is quantized by `minifloat.numerics.activation`, both sides are dequantized to float32,
    multiplied and summed in float32, the bias is added in float32, and the sum is rounded once to the dtype of `x`.
    Servers multiply the codes, which is exact in float32, and apply the scales after the sum (per block of 128 columns
    for blocks); here they are applied before it. This and the order of summation change results by float32 rounding
    only, 2**-24 of the largest partial sum per addition: far below the half step of E4M3, 2**-4, that quantizing costs.
    Tensor cores that keep fewer bits while they sum (Hopper's keep about 14) are not imitated, and a caller who allows
    TF32 on a GPU gets its 10 bits here too. A GPU with FP8 tensor cores computes as servers do (`scaled_mm`): on Hopper
    its sums have those 14 bits within a step of the tensor cores. `activation` alone decides whether inputs are
    quantized, at every number of rows; `impl` only chooses who computes.

    Inputs in int8 (`int8_inputs`): the kernels may round each row of `x` and the weight to int8 per group of 64
    columns, multiply integers, and scale and add the sums of groups in float32; the module `int8_reference` is the
    arithmetic. This permits, it does not demand: packed weights round `x` where this is measured to be faster
    (`minifloat.kernels.linear.int8_inputs.rounds`; never with one row of `x`), and `int8_inputs.why_not` says which
    processors and weights have no such kernel. The reference rounds at every number of rows, except for BF16 weights.
    A group of `x` with NaN or Inf makes its row of the result NaN.

    There is no gradient through packed weights: if `x` requires a gradient, backward raises.

    Args:
        x: ``[..., K]``, floating; any strides (contiguous rows need no copy).
        weight: A weight ``[N, K]``. Packed weights (`minifloat.kernels.pack.pack`, on a GPU
            `minifloat.kernels.linear.triton.pack`) are fast; a `QuantizedTensor` is multiplied by the reference, which
            decodes it in every call.
        bias: ``[N]``, the dtype of `x`, or float32.
        impl: "auto" (the native library or the GPU kernels for weights packed for them, if they can run; `scaled_mm`
            for quantized inputs and weights that are not packed, if the GPU has it), "reference", "cpu", "triton" or
            "scaled_mm".
        activation: How `x` is quantized; None for no quantization.
        input_scale: float32, one element, if `activation` is static, or NVFP4's divisor; else None.
        int8_inputs: Whether `x` may be rounded to int8; excludes `activation`.

    Returns:
        ``[..., N]``, the dtype of `x`. NaN in `x` spreads as in any matrix product, and so does Inf, except that a
        static `input_scale` clamps it.

    Source: vLLM, `cutlass_scaled_mm` and its block form; DeepSeek-V3 report, section 3.3.2, for Hopper's 14 bits.
    """
    if int8_inputs and activation is not None:
        raise ValueError("int8_inputs and activation exclude each other: both say how x is rounded")
    packed = None if impl == "scaled_mm" else _packed(weight, impl)
    if packed is not None and activation is None:
        return _multiply_one(x, packed, bias, int8_inputs)
    _check_shapes(x, weight.shape, bias)
    if activation is None:
        if impl == "scaled_mm":
            raise KernelUnavailable("linear(impl='scaled_mm') multiplies quantized inputs: give an activation")
        multiply = int8_reference.linear if int8_inputs else reference.linear
        return multiply(x, _unpacked(weight), bias)
    spec = weight.spec
    if spec is None or not can_quantize(activation, spec):
        weights = "BF16" if spec is None else f"{spec.element.name} with {spec.scale.name} scales"
        raise UnsupportedTensorError(
            "x",
            f"inputs in {describe_activation(activation)} are not simulated for weights in {weights}; such weights run "
            "weight-only",
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
    """Multiply one input with several weights in one call: q, k and v, or gate and up.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32.
        weights: Packed weights ``[N_i, K]`` of the same format and kind of scales. `FusedWeights` are validated once
            instead of in every call. Weights of a GPU may be of any kind, and are multiplied one after the other.
        biases: None, or for each weight ``[N_i]`` or None, all of one dtype.
        int8_inputs: Whether `x` may be rounded to int8, as by `linear`.

    Returns:
        ``[..., N_i]`` for each weight, views of one tensor ``[..., sum of N_i]``; the same bits as by `linear`.
    """
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
