"""A quantized weight in memory, independent of the layout: codes as stored, scales as a two-dimensional grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minifloat.errors import ShapeError
from minifloat.numerics.cast import decode, pack_nibbles, unpack_nibbles
from minifloat.numerics.cast import encode as encode_elements
from minifloat.numerics.formats import E8M0, FLOAT32
from minifloat.numerics.scale import choose_scales, effective_scale
from minifloat.numerics.scale_rules import expand
from minifloat.numerics.scheme import WeightSpec


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight matrix ``[N, K]`` in a low-precision format.

    Attributes:
        spec: Element format, granularity and scale format.
        shape: ``(N, K)`` of the unquantized weight.
        codes: uint8 ``[N, K]``, or ``[N, K / 2]`` where two elements share a byte (even column in the low nibble).
        scale: The scale grid of ``spec.granularity``: float32 values for FLOAT32 scales, uint8 codes otherwise.
        global_scale: float32 scalar of the whole tensor if ``spec.has_global_scale``, else None.
        global_divides: Whether `global_scale` divides (compressed-tensors) or multiplies (ModelOpt) to dequantize.
        zero_point: uint8 grid like `scale`, codes of the element's format whose value is subtracted before the scale
            multiplies (asymmetric integers); None for zero.
    """

    spec: WeightSpec
    shape: tuple[int, int]
    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None = None
    global_divides: bool = True
    zero_point: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows, cols = self.shape
        expected_codes = (rows, cols // 2 if self.packed else cols)
        expected_scale = self.spec.granularity.scale_shape(self.shape)
        if tuple(self.codes.shape) != expected_codes:
            raise ShapeError("codes", f"expected {expected_codes} for a {self.shape} weight, got {_shape(self.codes)}")
        if tuple(self.scale.shape) != expected_scale:
            raise ShapeError("scale", f"expected {expected_scale} for a {self.shape} weight, got {_shape(self.scale)}")
        if self.zero_point is not None and tuple(self.zero_point.shape) != expected_scale:
            raise ShapeError(
                "zero_point", f"expected {expected_scale} for a {self.shape} weight, got {_shape(self.zero_point)}"
            )
        if (self.global_scale is not None) != self.spec.has_global_scale:
            raise ShapeError("global_scale", f"present: {self.global_scale is not None}, scheme: {self.spec}")

    @property
    def packed(self) -> bool:
        """Whether two elements share a byte."""
        return self.spec.element.bits * 2 == torch.iinfo(torch.uint8).bits

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        extra = [tensor.nbytes for tensor in (self.global_scale, self.zero_point) if tensor is not None]
        return self.codes.nbytes + self.scale.nbytes + sum(extra)

    def block_scale(self) -> torch.Tensor:
        """Return the float32 grid that multiplies decoded elements; entries are not checked for NaN and Inf."""
        if self.spec.scale is FLOAT32:
            return self.scale
        if self.spec.scale is E8M0 or self.global_scale is None:
            return decode(self.scale, self.spec.scale)
        if self.global_divides:
            return effective_scale(self.scale, self.spec, self.global_scale)
        return decode(self.scale, self.spec.scale) * self.global_scale

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice | None = None) -> torch.Tensor:
        """Return the weight ``[N, K]`` in `dtype`: decoded element times scale in float32, rounded once.

        Args:
            dtype: Result dtype.
            rows: Rows to return, all by default; must start and end at multiples of the block rows (or at the edge).
        """
        start, stop, _ = (rows or slice(None)).indices(self.shape[0])
        codes = self.codes[start:stop]
        elements = decode(unpack_nibbles(codes) if self.packed else codes, self.spec.element)
        block_rows, _ = self.spec.granularity.block(self.shape)
        blocks, shape = slice(start // block_rows, -(-stop // block_rows)), (stop - start, self.shape[1])
        granularity = self.spec.granularity
        if self.zero_point is not None:
            elements.sub_(expand(decode(self.zero_point[blocks], self.spec.element), granularity, shape))
        return elements.mul_(expand(self.block_scale()[blocks], granularity, shape)).to(dtype)


def quantize_tensor(weight: torch.Tensor, spec: WeightSpec, tensor_amax: torch.Tensor | None = None) -> QuantizedTensor:
    """Quantize one weight in plain torch; the fast kernels of the streaming writer must equal the result bit for bit.

    Args:
        weight: ``[N, K]``, any floating dtype, finite.
        spec: Storage format of the result.
        tensor_amax: The amax of the whole tensor, for specs that need one; by default that of `weight`. For linears
            that a server fuses (q/k/v, gate/up) the maximum over all of them.

    Raises:
        ShapeError: If the weight is not a matrix, or its columns cannot be packed.
    """
    if weight.ndim != 2:
        raise ShapeError("weight", f"expected a matrix [N, K], got shape {_shape(weight)}")
    rows, cols = weight.shape
    scale, divisor = choose_scales(weight, spec, tensor_amax)
    factor = expand(effective_scale(scale, spec, divisor), spec.granularity, (rows, cols))
    codes = encode_elements(weight.to(torch.float32) / factor, spec.element)
    packed = pack_nibbles(codes) if spec.element.bits * 2 == torch.iinfo(torch.uint8).bits else codes
    return QuantizedTensor(spec, (rows, cols), packed, scale, divisor)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
