"""The work of a step: what decoding one token for each sequence, or computing one prompt, reads and multiplies."""

from __future__ import annotations

from collections.abc import Mapping

from minifloat.numerics.formats import BFLOAT16, ElementFormat
from minifloat.numerics.scheme import Scheme
from minifloat.plan.cache import attention_operations, cache_bytes, prefill_operations
from minifloat.plan.hardware import Hardware
from minifloat.plan.roofline import Work, experts_read, step_bytes
from minifloat.plan.shape import ModelShape
from minifloat.plan.weights import Weights

#: A multiplication and an addition.
_OPERATIONS = 2


def arithmetic(scheme: Scheme | None, hardware: Hardware) -> ElementFormat:
    """The format in which the quantized weights of a scheme are multiplied.

    Where inputs are not quantized, or the hardware does not multiply their format, a weight-only kernel decodes the
    weights and multiplies in BF16. That is what the hardware can do; some engines pick a weight-only kernel even where
    it could multiply in FP8.
    """
    if scheme is None or scheme.activation is None or scheme.activation.element not in hardware.peaks:
        return BFLOAT16
    return scheme.activation.element if scheme.activation.element is scheme.weight.element else BFLOAT16


def decode_work(
    weights: Weights,
    shape: ModelShape,
    element: ElementFormat,
    cache: ElementFormat,
    context: int,
    batch: int,
    gpus: int,
) -> Work:
    """One new token for each of `batch` sequences of `context` tokens, on one of `gpus` devices.

    Args:
        weights: Of the model.
        shape: Of the model.
        element: That quantized weights are multiplied in.
        cache: Element of the KV cache.
        context: Tokens of each sequence.
        batch: Sequences.
        gpus: Devices.
    """
    touched = experts_read(shape.experts, shape.chosen, batch) if shape.experts else 0.0
    read = weights.fixed + weights.routed * touched
    attention = attention_operations(shape.cache, context) / gpus
    return Work(
        step_bytes(read, batch, cache_bytes(shape.cache, context, cache, gpus)),
        _operations(weights, shape, element, batch, batch, batch * attention),
        batch,
    )


def prefill_work(
    weights: Weights, shape: ModelShape, element: ElementFormat, cache: ElementFormat, context: int, gpus: int
) -> Work:
    """One prompt of `context` tokens in one step; arguments as for `decode_work`. The cache is written once."""
    touched = experts_read(shape.experts, shape.chosen, context) if shape.experts else 0.0
    nbytes = weights.fixed + weights.routed * touched + cache_bytes(shape.cache, context, cache, gpus)
    attention = prefill_operations(shape.cache, context) / gpus
    return Work(nbytes, _operations(weights, shape, element, context, 1, attention), context)


def _operations(
    weights: Weights, shape: ModelShape, element: ElementFormat, tokens: int, sampled: int, attention: float
) -> Mapping[ElementFormat, float]:
    """Operations by format: attention, lm_head, routers and what is not quantized are multiplied in BF16.

    Args:
        weights: Of the model.
        shape: Of the model.
        element: That quantized weights are multiplied in.
        tokens: That pass through all layers.
        sampled: That logits are computed for.
        attention: Operations of the attention.
    """
    share = shape.chosen / shape.experts if shape.experts else 0.0
    low = _OPERATIONS * tokens * (weights.quantized + weights.quantized_routed * share)
    high = _OPERATIONS * (tokens * (weights.plain + weights.plain_routed * share) + sampled * weights.head) + attention
    return {BFLOAT16: high + low} if element is BFLOAT16 else {BFLOAT16: high, element: low}
