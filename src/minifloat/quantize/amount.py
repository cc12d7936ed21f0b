"""How much text codes are chosen with: as the widest linear of a plan needs it, known before there is any text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minifloat.calibration.options import DEFAULT_SAMPLES, TextOptions
from minifloat.errors import DataError
from minifloat.model.architecture.roles import expert_group
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.quantize.estimate import FEWEST_SEQUENCES, TOKENS_PER_CHANNEL, Tokens, visited_share

#: Tokens for statistics up to which a mixture of experts takes more text than its widest linear needs.
_MOST_FOR_EXPERTS = 1 << 18


def enough_text(text: TextOptions, plan: QuantizationPlan, config: Mapping[str, Any]) -> TextOptions:
    """Return the options with a number of sequences; refuse one that the user gave and that is too small."""
    width = widest(plan)
    if text.samples is None:
        tokens = max(TOKENS_PER_CHANNEL * width, _for_experts(plan, config))
        text = replace(text, samples=max(FEWEST_SEQUENCES, _sequences(text, tokens)))
    _require_enough(text, width)
    return text


def fewest_sequences(text: TextOptions, plan: QuantizationPlan) -> int:
    """Return the least number of sequences that the widest linear of a plan allows."""
    return _sequences(text, TOKENS_PER_CHANNEL * widest(plan))


def _require_enough(text: TextOptions, width: int) -> None:
    """Refuse sequences that leave too few tokens for linears of a width, before any of them is written or read."""
    if not text.held_out:
        raise DataError("codes that are chosen with data need held-out text to be judged on: hold out more than 0")
    # Few tokens are refused, and the correction is not made weaker instead (its factor follows held-out rows anyway):
    # below four tokens per channel the Hessian itself is of noise, and the codes follow this noise.
    samples, needed = text.samples or DEFAULT_SAMPLES, TOKENS_PER_CHANNEL * width
    if (kept := Tokens.of(samples, text).kept) < needed:
        raise DataError(
            f"{samples:,} sequences of {text.seq_len:,} tokens leave {kept:,} tokens for statistics, too few for "
            f"linears with {width:,} input channels: give at least {_sequences(text, needed):,} "
            "(--calibration-samples), or leave the number out"
        )


def require_tokens(tokens: int, width: int) -> None:
    """Refuse text whose documents gave too few tokens for linears of a width."""
    if tokens < (needed := TOKENS_PER_CHANNEL * width):
        raise DataError(
            f"the text has {tokens:,} tokens for statistics, too few for linears with {width:,} input channels: give "
            f"at least {needed:,}, and a tenth more that is held out"
        )


def widest(plan: QuantizationPlan) -> int:
    """Return the largest number of input channels of a linear that is quantized."""
    return max((part.shape[1] for tensor in plan.tensors for part in tensor.parts), default=0)


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
