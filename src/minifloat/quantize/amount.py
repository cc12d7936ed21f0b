"""How much text codes are chosen with: as the widest linear of a plan needs it, known before there is any text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minifloat.calibration.options import TextOptions
from minifloat.errors import DataError
from minifloat.model.architecture.roles import expert_group
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.quantize.estimate import FEWEST_SEQUENCES, TOKENS_PER_CHANNEL, Tokens, visited_share

#: Tokens for statistics up to which a mixture of experts takes more text than its widest linear needs.
_MOST_FOR_EXPERTS = 1 << 18


def enough_text(text: TextOptions, plan: QuantizationPlan, config: Mapping[str, Any]) -> TextOptions:
    """Return the options with a number of sequences; refuse one that the user gave and that is too small."""
    if not text.held_out:
        raise DataError("a method that chooses codes with data needs held-out text to be judged on")
    needed = tokens_needed(plan)
    if text.samples is None:
        return replace(text, samples=max(FEWEST_SEQUENCES, _sequences(text, max(needed, _for_experts(plan, config)))))
    # Few tokens are refused, and the correction is not made weaker instead (its factor follows held-out rows anyway):
    # below four tokens per channel the Hessian itself is of noise, and the codes follow this noise.
    if (kept := Tokens.of(text.samples, text).kept) < needed:
        raise DataError(
            f"{text.samples:,} sequences of {text.seq_len:,} tokens leave {kept:,} tokens for statistics, too few for "
            f"linears with {widest(plan):,} input channels: give at least {_sequences(text, needed):,} "
            "(--calibration-samples), or leave the number out"
        )
    return text


def widest(plan: QuantizationPlan) -> int:
    """Return the largest number of input channels of a linear that is quantized."""
    return max((part.shape[1] for tensor in plan.tensors for part in tensor.parts), default=0)


def tokens_needed(plan: QuantizationPlan) -> int:
    """Return the tokens that the statistics of the widest linear need."""
    return TOKENS_PER_CHANNEL * widest(plan)


def _for_experts(plan: QuantizationPlan, config: Mapping[str, Any]) -> int:
    """Return the tokens with which an expert sees one for each of its inputs on average, within a bound."""
    widths = (part.shape[1] for tensor in plan.tensors for part in tensor.parts if expert_group(part.module))
    return min(round(max(widths, default=0) / visited_share(config)), _MOST_FOR_EXPERTS)


def _sequences(text: TextOptions, tokens: int) -> int:
    """Return the least number of sequences that leave so many tokens for statistics."""
    samples = -(-tokens // text.seq_len)
    while Tokens.of(samples, text).kept < tokens:
        samples += 1
    return samples
