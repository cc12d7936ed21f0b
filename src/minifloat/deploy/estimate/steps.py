"""The cost of a step: bytes and operations of decoding one token per sequence, or of the prefill of one prompt."""

from __future__ import annotations

from collections.abc import Mapping

from minifloat.deploy.estimate.cache import attention_operations, cache_bytes, prefill_operations, state_bytes
from minifloat.deploy.estimate.hardware import Hardware
from minifloat.deploy.estimate.roofline import StepCost, experts_read, step_bytes
from minifloat.deploy.estimate.shape import ModelShape
from minifloat.deploy.estimate.weights import Weights
from minifloat.numerics.formats import BFLOAT16, E2M1, E4M3, FLOAT32, ElementFormat
from minifloat.numerics.scheme import Scheme

#: A multiplication and an addition.
_OPERATIONS = 2


def arithmetic(scheme: Scheme | None, hardware: Hardware) -> ElementFormat:
    """Return the format in which a device multiplies the quantized weights of a scheme.

    Where inputs are not quantized, or the hardware does not multiply their format, a weight-only kernel decodes the
    weights and multiplies in BF16. Some engines choose a weight-only kernel even where the hardware could multiply in
    FP8. MX formats are multiplied by machines that multiply FP4, E2M1 with E4M3 at the rate of E4M3; NVFP4 by those of
    NVIDIA only.

    Source: PTX ISA, `tcgen05.mma` with kinds mxf8f6f4 and mxf4nvf4; AMD CDNA 4 ISA, `V_MFMA_SCALE_F32_*_F8F6F4`.
    """
    inputs = None if scheme is None else scheme.activation
    if scheme is None or inputs is None or inputs.element not in hardware.peaks:
        return BFLOAT16
    if inputs.scale is FLOAT32:
        return inputs.element if inputs.element is scheme.weight.element else BFLOAT16
    if E2M1 not in hardware.peaks or (inputs.scale is E4M3 and hardware.generation.vendor != "nvidia"):
        return BFLOAT16
    return inputs.element


def decode_cost(
    weights: Weights,
    shape: ModelShape,
    element: ElementFormat,
    cache: ElementFormat,
    context: int,
    batch: int,
    gpus: int,
) -> StepCost:
    """Return the cost of one new token for each of `batch` sequences, on one of `gpus` devices."""
    touched = experts_read(shape.experts, shape.experts_per_token, batch) if shape.experts else 0.0
    read = weights.fixed + weights.routed * touched
    attention = attention_operations(shape.cache, context) / gpus
    states = 2 * state_bytes(shape.cache, gpus)  # read and written
    return StepCost(
        step_bytes(read, batch, cache_bytes(shape.cache, context, cache, gpus) + states),
        _operations(weights, shape, element, batch, batch, batch * attention),
        batch,
    )


def prefill_cost(
    weights: Weights, shape: ModelShape, element: ElementFormat, cache: ElementFormat, context: int, gpus: int
) -> StepCost:
    """Return the cost of the prefill of one prompt of `context` tokens in one step, which writes the caches once."""
    touched = experts_read(shape.experts, shape.experts_per_token, context) if shape.experts else 0.0
    written = cache_bytes(shape.cache, context, cache, gpus) + state_bytes(shape.cache, gpus)
    nbytes = weights.fixed + weights.routed * touched + written
    attention = prefill_operations(shape.cache, context) / gpus
    return StepCost(nbytes, _operations(weights, shape, element, context, 1, attention), context)


def _operations(
    weights: Weights, shape: ModelShape, element: ElementFormat, tokens: int, sampled: int, attention: float
) -> Mapping[ElementFormat, float]:
    """Return operations by format; attention, lm_head, routers and unquantized weights are multiplied in BF16."""
    share = shape.experts_per_token / shape.experts if shape.experts else 0.0
    low = _OPERATIONS * tokens * (weights.quantized + weights.quantized_routed * share)
    high = _OPERATIONS * (tokens * (weights.plain + weights.plain_routed * share) + sampled * weights.head) + attention
    return {BFLOAT16: high + low} if element is BFLOAT16 else {BFLOAT16: high, element: low}
