"""Output matching: GPTQ towards the weight that gives the original outputs on the inputs of the quantized model.

The layers before a linear are quantized already, so that its inputs X differ from the inputs Xf of the original model.
The weight W' = W + W (Xf - X)'X (X'X + l I)^-1 gives on X the outputs that are closest to W Xf. GPTQ then rounds W'
instead of W. A linear that adds to the residual stream also makes up for half of the error that the stream has by then:
that half is added to W (Xf - X).

W' - W is an estimate from a finite text and would do harm if that is short, so it is multiplied by the factor that is
best on held-out text, which is near 1 if there are many tokens for each of the K columns and falls towards 0 if there
are few.

Source: the output target is that of GPTAQ (arXiv 2504.02692) and Qronos (arXiv 2505.11695).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.quantize.rounding.factor import regress, times
from minifloat.quantize.rounding.grid import Grid
from minifloat.quantize.rounding.methods.gptq import compensate
from minifloat.quantize.rounding.methods.protocol import Inputs, Rounded
from minifloat.quantize.rounding.statistics import Rows, output_error


class Match:
    """GPTQ whose target matches the outputs of the original layer."""

    name = "match"
    summary = "error compensation that matches the outputs of the original layers, layer by layer"
    needs_data = True
    follows_quantized = True
    trains = False

    def round(self, weights: Sequence[Tensor], grids: Sequence[Grid], inputs: Inputs) -> Rounded:
        """Return codes whose outputs on the inputs of the quantized model match the original outputs."""
        weight = torch.cat(list(weights))
        target, details = matched(weight, inputs)
        return Rounded(compensate(target, grids, inputs.required_feedback), details)


def matched(weight: Tensor, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
    """Return the weight whose outputs on X match the original outputs on Xf, and the factor of its change."""
    statistics, held_out = inputs.statistics, inputs.held_out
    lacking = statistics.output_drift
    if statistics.drift is not None:
        lacking = times(weight, statistics.drift)
    if lacking is None:
        return weight, {}
    step = regress(lacking, inputs.required_feedback)
    error = None if held_out is None else output_error(held_out, weight, lambda x, w: times(x, w.T.contiguous()))
    factor = _factor(step, error, held_out, statistics.tokens)
    return weight + factor * step, {"drift_factor": factor}


def _factor(step: Tensor, error: Tensor | None, held_out: Rows | None, tokens: int) -> float:
    """Return the factor from 0 to 1 of a change of the weight that removes most of an error of outputs."""
    if error is None or held_out is None:
        columns = step.shape[1]
        return tokens / (tokens + TOKENS_PER_COLUMN * columns)
    change = times(held_out.inputs, step.T.contiguous())
    energy = float(change.square().sum())
    return min(max(float((error * change).sum()) / energy, 0.0), 1.0) if energy > 0 else 0.0


#: Tokens per column at which half of an estimate counts, where no held-out text says how much of it is right.
TOKENS_PER_COLUMN = 4
