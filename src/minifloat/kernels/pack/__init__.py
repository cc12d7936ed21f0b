"""`pack` rearranges a weight of a checkpoint into the order in which the kernels read it, once, at load."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.errors import NonFiniteError, ShapeError, UnsupportedTensorError
from minifloat.kernels import native
from minifloat.kernels.native import IMPLEMENTATIONS
from minifloat.kernels.pack import cpu, reference
from minifloat.kernels.pack.layout import BLOCK, ROW, form_of, plan
from minifloat.kernels.pack.weight import FusedWeights, PackedWeight, allocate
from minifloat.numerics.cast import decode
from minifloat.numerics.formats import E8M0, FLOAT32
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor

__all__ = ["FusedWeights", "IMPLEMENTATIONS", "PackedWeight", "pack", "why_not"]


def why_not(
    spec: WeightSpec | None, shape: tuple[int, ...], device: torch.device | str, dtype: torch.dtype = torch.bfloat16
) -> str:
    """Return why a weight has no packed form; empty if it has one."""
    if torch.device(device).type != "cpu":
        return f"it is on {device}; the kernels compute on the CPU"
    if len(shape) != 2:
        return f"it is no matrix [N, K] but {list(shape)}"
    if spec is None and dtype != torch.bfloat16:
        return f"it is {dtype}; there are kernels for quantized weights and torch.bfloat16"
    form = form_of(spec, (shape[0], shape[1]))
    return f"there is no kernel for {form}" if isinstance(form, str) else ""


def pack(weight: QuantizedTensor | Tensor, *, impl: str = "auto", threads: int | None = None) -> PackedWeight:
    """Pack a weight."""
    runs_native = native.runs("pack", impl)
    codes, scale, factor, spec = _parts(weight)
    if len(weight.shape) != 2:
        raise ShapeError("weight", f"expected a matrix [N, K], got shape {list(weight.shape)}")
    shape = (weight.shape[0], weight.shape[1])
    form = form_of(spec, shape)
    problem = why_not(spec, shape, codes.device, codes.dtype)
    if problem or isinstance(form, str):
        raise UnsupportedTensorError("weight", f"has no packed form: {problem}")
    if form.grid in (ROW, BLOCK) and scale is not None and spec is not None and spec.scale is E8M0:
        scale = decode(scale, E8M0)
    if scale is not None and scale.dtype == torch.float32 and not bool(scale.isfinite().all()):
        raise NonFiniteError("scale", "NaN or Inf among the scales of the weight; the checkpoint is damaged")
    data = allocate(plan(form).total)
    if runs_native:
        cpu.pack(codes, scale, factor, form, data, threads)
    else:
        reference.pack(codes, scale, factor, form, data)
    return PackedWeight(data, spec, shape)


def _parts(weight: QuantizedTensor | Tensor) -> tuple[Tensor, Tensor | None, float, WeightSpec | None]:
    """Return codes, scales, the factor of the scales, and the spec."""
    if isinstance(weight, Tensor):
        return weight.detach().contiguous(), None, 1.0, None
    factor = 1.0
    if weight.global_scale is not None:
        tensor_scale = weight.global_scale.float().reshape(())
        factor = float(tensor_scale.reciprocal() if weight.global_divides else tensor_scale)
        if not torch.isfinite(torch.tensor(factor)):
            raise NonFiniteError("global_scale", f"the scale of the weight is {float(tensor_scale)}")
    scale = weight.scale.contiguous()
    if weight.spec.scale is FLOAT32:
        scale = scale.float()
    return weight.codes.contiguous().view(torch.uint8), scale, factor, weight.spec
