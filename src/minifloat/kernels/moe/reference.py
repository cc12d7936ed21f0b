"""`moe_linear` in plain PyTorch, the reference of the faster implementations: one linear per expert that has tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.kernels.linear import int8_reference, reference
from minifloat.kernels.pack import PackedWeight


def moe_linear(
    x: Tensor,
    experts: Sequence[PackedWeight],
    offsets: Tensor,
    x_rows: Tensor | None,
    biases: Tensor | None,
    int8_inputs: bool = False,
) -> Tensor:
    """Implement `minifloat.kernels.moe.moe_linear` with the numerics of the reference of `linear`."""
    bounds = offsets.tolist()
    linear = int8_reference.linear if int8_inputs else reference.linear
    parts = [x.new_empty(0, experts[0].shape[0])]
    for expert, weight in enumerate(experts):
        rows = slice(bounds[expert], bounds[expert + 1])
        if rows.start < rows.stop:
            tokens = x[rows] if x_rows is None else x[x_rows[rows]]
            parts.append(linear(tokens, weight.unpack(), None if biases is None else biases[expert]))
    return torch.cat(parts)
