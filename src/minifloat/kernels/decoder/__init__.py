"""`step`: new tokens of a batch of sequences through all layers of a Llama-like decoder, in one call.

A decoded token meets some two hundred small operations between its linears; as calls from Python each would cost as
much as it computes. Keys and values live in a paged cache; who owns which block is the scheduler's business, and
sampling from the logits the sampler's. Left out: gradients, and other devices than the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.errors import KernelUnavailable, UnknownNameError
from minifloat.kernels.decoder import cpu, reference
from minifloat.kernels.decoder.cache import ELEMENTS, KVCache
from minifloat.kernels.decoder.check import check
from minifloat.kernels.decoder.types import BLOCK_TOKENS, Attention, Decoder, Experts, Layer, Mlp, StepBatch

__all__ = [
    "BLOCK_TOKENS",
    "ELEMENTS",
    "IMPLEMENTATIONS",
    "Attention",
    "StepBatch",
    "Decoder",
    "Experts",
    "KVCache",
    "Layer",
    "Mlp",
    "step",
]

IMPLEMENTATIONS = ("auto", "reference", "cpu")


def step(decoder: Decoder, cache: KVCache, batch: StepBatch, impl: str = "auto") -> Tensor:
    """Put the new tokens of a batch into the cache and compute the logits that are asked for.

    Every number is float32 but the inputs and outputs of linears and the queries, which are rounded to
    `Decoder.dtype`, and keys and values, which are rounded once to the element of the cache (E4M3: divided by their
    scale, clamped). Linears are those of `minifloat.kernels.linear.linear`: no weight is rounded, sums are float32.

    The logits of a sequence do not depend on what else is in the batch, nor on how its tokens are cut into steps,
    beyond the order of float32 sums. NaN in one sequence does not reach another, and neither does what memory of the
    cache held before it was written.

    Args:
        decoder: The model.
        cache: Of the decoder's layers, heads and head size; written, and nothing else is.
        batch: What to compute.
        impl: "auto" (the native library where it is loaded, else the reference), "reference" or "cpu".

    Returns:
        float32 ``[R, vocab]``, rows as `StepBatch.logits` names them.

    Raises:
        UnknownNameError: Another `impl`.
        KernelUnavailable: ``impl="cpu"`` cannot run here.
        ShapeError: The cache is not of the decoder, or numbers of the batch do not go together; nothing was written.
        UnsupportedTensorError: A tensor of the batch is not int32, contiguous, on the CPU; nothing was written.
    """
    if impl not in IMPLEMENTATIONS:
        raise UnknownNameError("impl", impl, IMPLEMENTATIONS)
    reason = cpu.why_not()
    if impl == "cpu" and reason:
        raise KernelUnavailable(f"step(impl='cpu') cannot run: {reason}")
    check(decoder, cache, batch)
    if impl != "reference" and not reason:
        return cpu.step(decoder, cache, batch)
    with torch.no_grad():
        return reference.step(decoder, cache, batch)
