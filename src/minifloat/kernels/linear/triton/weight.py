"""`GpuWeight`: a quantized weight in a GPU's memory in the order in which kernels read it; packing and unpacking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from minifloat.errors import NonFiniteError, UnsupportedTensorError
from minifloat.kernels.linear.triton import layout
from minifloat.kernels.linear.triton.config import prepare
from minifloat.kernels.linear.triton.config import why_not as why_no_device
from minifloat.kernels.linear.triton.layout import TILE_COLS, GpuForm, Order, form_of
from minifloat.numerics.cast import decode, pack_nibbles, unpack_nibbles
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor

_SIGN = 1 << (E4M3.bits - 1)


@dataclass(frozen=True, eq=False)
class GpuWeight:
    """A weight ``[N, K]`` as the kernels of a GPU read it (`minifloat.kernels.linear.triton.layout`)."""

    spec: WeightSpec
    shape: tuple[int, int]
    order: Order
    codes: Tensor
    row_scale: Tensor  #: float32 ``[N]``, padded to whole panels: the factor of the sum of a row
    factors: Tensor | None = None  #: int32, flat: coded block scales in fragments; None if the form has none
    block_scale: Tensor | None = None  #: float32 ``[rows of blocks, columns of blocks]``; `GpuForm.FP8_BLOCK` only
    scale: Tensor | None = None  #: the scale grid of the checkpoint, if it cannot be restored from the other tensors
    global_scale: Tensor | None = None
    global_divides: bool = True

    @cached_property
    def form(self) -> GpuForm:
        form = form_of(self.spec, self.shape)
        assert isinstance(form, GpuForm)
        return form

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors())

    @property
    def tiles(self) -> int:
        return -(-self.shape[1] // TILE_COLS)

    @property
    def block(self) -> tuple[int, int]:
        return self.spec.granularity.block(self.shape)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of the tensors; a module may keep them as buffers."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield field.name, value

    def with_tensors(self, tensors: dict[str, Tensor]) -> GpuWeight:
        """Return the same weight with other tensors, for example on another device."""
        return replace(self, **tensors)  # type: ignore[arg-type]

    def unpack(self) -> QuantizedTensor:
        """Return the weight as checkpoints store it, on the same device: the packed codes and scales, bit for bit."""
        rows, cols = self.shape
        codes = layout.unpack_elements(self.codes, self.shape, self.form, self.order)
        scale = self.scale
        if self.factors is not None:
            groups = self.spec.granularity.scale_shape(self.shape)[1]
            coded = layout.unpack_factors(self.factors, self.shape, groups)
            if scale is None and self.form is GpuForm.NVFP4:
                scale = layout.scales_of(coded)
            elif scale is None:
                scale = layout.powers(coded, layout.largest_codes(self.row_scale[:rows], self.form))
            elif self.form is GpuForm.NVFP4:
                codes = _negated(codes, scale, cols)
        elif scale is None:
            scale = self.block_scale
        assert scale is not None
        if self.spec.element is E2M1:
            codes = pack_nibbles(codes)
        return QuantizedTensor(self.spec, self.shape, codes, scale, self.global_scale, self.global_divides)

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice | None = None) -> Tensor:
        """Return the weight ``[N, K]`` in `dtype`: decoded element times scale in float32, rounded once."""
        return self.unpack().dequantize(dtype, rows)


def why_not(spec: WeightSpec, shape: tuple[int, int], device: torch.device | str) -> str:
    """Return why a weight has no form for the kernels of a GPU; empty if it has one."""
    reason: str = why_no_device(device)
    if reason:
        return reason
    form = form_of(spec, shape)
    return f"there is no kernel for {form}" if isinstance(form, str) else ""


def pack(weight: QuantizedTensor) -> GpuWeight:
    problem = why_not(weight.spec, weight.shape, weight.codes.device)
    if problem:
        raise UnsupportedTensorError("weight", f"has no packed form: {problem}")
    packed = arrange(weight, Order.of(torch.cuda.get_device_capability(weight.codes.device)))
    prepare(weight.codes.device)
    return packed


def arrange(weight: QuantizedTensor, order: Order) -> GpuWeight:
    """Rearrange the tensors of a weight, on any device and in any order."""
    form = form_of(weight.spec, weight.shape)
    if isinstance(form, str):
        raise UnsupportedTensorError("weight", f"has no packed form: there is no kernel for {form}")
    elements = unpack_nibbles(weight.codes) if weight.packed else weight.codes.view(torch.uint8)
    row_scale = torch.ones(weight.shape[0], device=elements.device)
    nan = torch.zeros(weight.shape[0], dtype=torch.bool, device=elements.device)
    if weight.spec.element is E4M3:
        nan |= _is_nan(elements).any(dim=1)
    factors = block_scale = stored_scale = None
    if form in (GpuForm.FP8, GpuForm.FP8_BLOCK):
        stored_scale, values = weight.scale, _finite("scale", weight.block_scale())
        if form is GpuForm.FP8_BLOCK:
            block_scale = values.contiguous()
            stored_scale = None if weight.spec.scale is FLOAT32 and block_scale is weight.scale else stored_scale
        else:
            row_scale = values[:, 0].repeat_interleave(weight.spec.granularity.block(weight.shape)[0])
            row_scale = row_scale[: weight.shape[0]].clone()
    elif form is GpuForm.NVFP4:
        elements, factors, stored_scale, row_scale = _coded_scales(weight, elements)
        nan |= _is_nan(weight.scale).any(dim=1)
    else:
        factors, stored_scale, row_scale = _coded_powers(weight, elements, form)
        nan |= torch.eq(weight.scale, E8M0.nan_code or 0).any(dim=1)
    row_scale[nan] = torch.nan
    return GpuWeight(
        weight.spec,
        weight.shape,
        order,
        layout.pack_elements(elements, form, order),
        layout.padded(row_scale[:, None], 1)[:, 0].contiguous(),
        factors,
        block_scale,
        stored_scale,
        weight.global_scale,
        weight.global_divides,
    )


def _coded_powers(weight: QuantizedTensor, elements: Tensor, form: GpuForm) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return factors of E8M0 scales, the scales if the factors do not determine them, and the factors of the rows."""
    coded, largest = layout.code_powers(elements, weight.scale, weight.spec.element)
    row_scale = (decode(largest, E8M0).double() * 2.0 ** -layout.SHIFTS[form]).float()
    nan = torch.eq(weight.scale, E8M0.nan_code or 0).any() | (_is_nan(elements).any() & (weight.spec.element is E4M3))
    is_exact = ~nan & torch.eq(layout.powers(coded, largest), weight.scale).all()
    return layout.pack_factors(coded, form), None if bool(is_exact) else weight.scale, row_scale


def _coded_scales(weight: QuantizedTensor, elements: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return elements under positive scales, factors of scales, the scales if needed, and the factors of the rows."""
    assert weight.global_scale is not None
    tensor_scale = weight.global_scale.float().reshape(())
    factor = _finite("global_scale", tensor_scale.reciprocal() if weight.global_divides else tensor_scale)
    coded = layout.code_scales(weight.scale)
    cols = weight.shape[1]
    usual = (weight.scale > 0) & (weight.scale < _SIGN) & ~_is_nan(weight.scale)
    rows = (factor * 2.0 ** -layout.SHIFTS[GpuForm.NVFP4]).expand(weight.shape[0]).clone()
    packed = layout.pack_factors(coded, GpuForm.NVFP4)
    if bool(usual.all()):
        return elements, packed, None, rows
    zero = _spread((weight.scale & (_SIGN - 1)) == 0, cols)
    return _negated(elements, weight.scale, cols).masked_fill(zero, 0), packed, weight.scale, rows


def _negated(elements: Tensor, scale: Tensor, cols: int) -> Tensor:
    """Flip the signs of E2M1 codes under negative scales."""
    sign = 1 << (E2M1.bits - 1)
    return elements ^ (_spread(scale >= _SIGN, cols).to(torch.uint8) * sign)


def _spread(groups: Tensor, cols: int) -> Tensor:
    return groups.repeat_interleave(layout.GROUP_COLS[GpuForm.NVFP4], dim=1)[:, :cols]


def _is_nan(codes: Tensor) -> Tensor:
    return torch.eq(codes & (_SIGN - 1), E4M3.nan_code or 0)


def _finite(name: str, values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise NonFiniteError(name, "NaN or Inf among the scales of the weight; the checkpoint is damaged")
    return values
