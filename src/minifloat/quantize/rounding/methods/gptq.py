"""GPTQ: the error of each column is compensated by the columns that are rounded after it.

Scales are those of rounding to nearest, chosen before and then fixed ("static groups"), and columns go by falling
diagonal of the Hessian ("act order"). The inputs are those of the original model, so one pass over the text serves
every scheme.

Source: Frantar et al., GPTQ (arXiv 2210.17323); the form without an inverse: `minifloat.quantize.rounding.factor`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.kernels.rounding import round_with_feedback
from minifloat.quantize.rounding.factor import Feedback
from minifloat.quantize.rounding.grid import Grid
from minifloat.quantize.rounding.methods.protocol import Inputs, Rounded


class Gptq:
    """GPTQ with static scales, columns ordered by the diagonal of the Hessian."""

    name = "gptq"
    summary = "error compensation under the inputs of the original model (GPTQ)"
    needs_data = True
    follows_quantized = False
    trains = False

    def round(self, weights: Sequence[Tensor], grids: Sequence[Grid], inputs: Inputs) -> Rounded:
        """Return codes whose joint error of outputs is small."""
        return Rounded(compensate(torch.cat(list(weights)), grids, inputs.required_feedback))


def compensate(target: Tensor, grids: Sequence[Grid], feedback: Feedback) -> list[Tensor]:
    """Round weights column by column with feedback."""
    order = feedback.order
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    scales = torch.cat([grid.row_scales() for grid in grids])
    groups = grids[0].column_groups()[order]
    codes = round_with_feedback(target[:, order].contiguous(), scales, groups, feedback.matrix, grids[0].spec.element)
    return list(torch.split(codes[:, inverse], [grid.nearest.shape[0] for grid in grids]))
