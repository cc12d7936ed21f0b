"""Latent weights: floats in units of the scale that are rounded to the codes of a weight, and can be trained.

The scales stay as they are. A latent starts from the original weight, moved into the cell of values that round to the
code that a method chose, so that the first codes are those of the method and the distance to the next code is known.
Gradients pass through the rounding as if it were the identity ("straight-through"), except beyond the outermost cells.

Source: Bengio et al. (arXiv 1308.3432), section 4, for the straight-through estimator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import ElementFormat
from minifloat.numerics.pack import pack_nibbles, unpack_nibbles
from minifloat.numerics.scale_rules import expand
from minifloat.numerics.tensor import QuantizedTensor

#: Share of a cell that a latent may start in: at the edge, a change by one rounding error would change the code.
CELL_LIMIT = 0.9


@dataclass(frozen=True)
class Cells:
    """The intervals of values that round to each code of a format; the outermost ones are made symmetric.

    Attributes:
        lower: float32, one entry per code: the lower end, or NaN where the code is no number.
    """

    lower: Tensor
    upper: Tensor
    step: Tensor
    top: float


@cache
def cells(element: ElementFormat) -> Cells:
    """Return the cells of a signed format of at most 8 bits."""
    values = torch.tensor(element.values, dtype=torch.float64)
    finite = values.isfinite()
    grid = torch.tensor(sorted({*values[finite].tolist()}), dtype=torch.float64)  # the two zeros are one
    middles = (grid[1:] + grid[:-1]) / 2
    last = (grid[-1] - grid[-2]) / 2
    edges = torch.cat([grid[:1] - last, middles, grid[-1:] + last])
    index = torch.searchsorted(grid, torch.where(finite, values, 0.0))
    lower, upper = (torch.where(finite, edges[index + end], torch.nan).float() for end in (0, 1))
    return Cells(lower, upper, upper - lower, float(edges[-1]))


class LatentWeight:
    """A quantized weight that can be trained.

    Attributes:
        values: The latents, float32 ``[N, K]``, in units of the scale; a leaf that requires a gradient.
    """

    def __init__(self, quantized: QuantizedTensor, weight: Tensor, device: torch.device) -> None:
        self.start = quantized
        self._table = cells(quantized.spec.element)
        self.top = self._table.top
        self.scales = quantized.block_scale().to(device)
        codes = _unpacked(quantized).to(device).to(torch.int32)
        chosen = decode(codes.to(torch.uint8), quantized.spec.element)
        lower, upper = (table.to(device)[codes] for table in (self._table.lower, self._table.upper))
        low = chosen - CELL_LIMIT * (chosen - lower)
        high = chosen + CELL_LIMIT * (upper - chosen)
        self.values = torch.minimum(torch.maximum(weight.to(device).float() / self._factors(), low), high)
        self.values.requires_grad_(True)
        self.step = float(self._table.step.to(device)[codes].mean())

    def weight(self) -> Tensor:
        """Return the weight of the current codes, float32 ``[N, K]``."""
        with torch.no_grad():
            return decode(self.codes(), self.start.spec.element).mul_(self._factors())

    def set_gradient(self, of_weight: Tensor) -> None:
        """Set the gradient of the latents from that of the weight, ``[N, K]`` in any dtype."""
        values = self.values.detach()
        self.values.grad = (of_weight.float() * self._factors()).mul_(values.abs() <= self.top)

    def clamp(self) -> None:
        """Move latents beyond the outermost cells back to their edge, where gradients pass."""
        with torch.no_grad():
            self.values.clamp_(-self.top, self.top)

    def codes(self) -> Tensor:
        """Return the current codes, uint8 ``[N, K]``, one per byte."""
        return encode(self.values.detach(), self.start.spec.element)

    def quantized(self) -> QuantizedTensor:
        """Return the weight with the current codes, on the CPU."""
        codes, start = self.codes().cpu(), self.start
        packed = pack_nibbles(codes) if start.packed else codes
        return QuantizedTensor(start.spec, start.shape, packed, start.scale, start.global_scale)

    def changed_codes(self, weight: QuantizedTensor) -> int:
        """Return the number of elements whose code differs from the first one; the sign of zero counts as none."""
        element = self.start.spec.element
        return int((decode(_unpacked(weight), element) != decode(_unpacked(self.start), element)).sum())

    def _factors(self) -> Tensor:
        return expand(self.scales, self.start.spec.granularity, self.start.shape)


def _unpacked(quantized: QuantizedTensor) -> Tensor:
    return unpack_nibbles(quantized.codes) if quantized.packed else quantized.codes
