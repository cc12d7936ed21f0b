"""`step` runs the new tokens of a batch of sequences through all layers of a decoder, in one call.

A decoded token passes some two hundred small operations between its linears; called from Python, each would cost as
much as it computes. Keys and values are in a paged cache, whose blocks the scheduler assigns. Not included: sampling,
gradients, and other devices than the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.errors import KernelUnavailable, UnknownNameError
from minifloat.kernels.decoder import cpu, reference
from minifloat.kernels.decoder.attention import Attention, CacheShape, Latent
from minifloat.kernels.decoder.cache import ELEMENTS, KVCache, SequenceStates
from minifloat.kernels.decoder.check import check
from minifloat.kernels.decoder.cpu import PARTS
from minifloat.kernels.decoder.delta import DeltaNet
from minifloat.kernels.decoder.mlp import ExpertNorms, Experts, LayerInput, LayerInputs, Mlp, Router
from minifloat.kernels.decoder.norm import Norm, Rotary
from minifloat.kernels.decoder.types import BLOCK_TOKENS, Decoder, Layer, StepBatch
from minifloat.kernels.decoder_layout import Activation

__all__ = [
    "BLOCK_TOKENS",
    "ELEMENTS",
    "IMPLEMENTATIONS",
    "PARTS",
    "Activation",
    "Attention",
    "CacheShape",
    "Decoder",
    "DeltaNet",
    "ExpertNorms",
    "Experts",
    "KVCache",
    "Latent",
    "Layer",
    "LayerInput",
    "LayerInputs",
    "Mlp",
    "Norm",
    "Rotary",
    "Router",
    "SequenceStates",
    "StepBatch",
    "step",
]

IMPLEMENTATIONS = ("auto", "reference", "cpu")


def step(
    decoder: Decoder,
    cache: KVCache,
    batch: StepBatch,
    impl: str = "auto",
    states: SequenceStates | None = None,
    *,
    nanoseconds: Tensor | None = None,
) -> Tensor:
    """Put the new tokens of a batch into the cache and compute the requested logits.

    Every number is float32, except the inputs and outputs of linears and the queries, which are rounded to
    `Decoder.dtype`, and keys and values, which are rounded once to the element of the cache (E4M3: divided by their
    scale, clamped). Linears are those of `minifloat.kernels.linear.linear`: no weight is rounded, sums are float32.
    With `Decoder.int8_inputs` they round inputs and weights to int8 where the kernels do, and in the reference always.

    The logits of a sequence do not depend on other sequences of the batch, nor on how its tokens are divided into
    steps, up to the order of float32 sums; with `Decoder.batch_invariant`, to the last bit. Neither NaN of another
    sequence nor old contents of the cache reach a sequence.

    Args:
        decoder: The model.
        cache: A cache of the decoder's `cache_shapes`; written.
        batch: The new tokens and the requested logits.
        impl: "auto" (the native library if it is loaded, else the reference), "reference" or "cpu".
        states: The states of the sequences, of the decoder's `state_floats` if that is not 0; written. If the step
            fails while it runs, the states of its sequences are lost: they begin at position 0 again.
        nanoseconds: int64 ``[len(PARTS)]``, to which the native library adds the time of each part; None: not measured.

    Returns:
        float32 ``[R, vocab]``, a row for each entry of `StepBatch.logits`.
    """
    if impl not in IMPLEMENTATIONS:
        raise UnknownNameError("impl", impl, IMPLEMENTATIONS)
    reason = cpu.why_not()
    if impl == "cpu" and reason:
        raise KernelUnavailable(f"step(impl='cpu') cannot run: {reason}")
    if decoder.batch_invariant and (impl == "reference" or reason):
        raise KernelUnavailable(f"the reference is not batch-invariant{f': {reason}' if reason else ''}")
    check(decoder, cache, batch, states)
    if states is not None and batch.slots is not None:
        states.begin(batch.slots)
    if impl != "reference" and not reason:
        logits = cpu.step(decoder, cache, batch, nanoseconds, states)
    else:
        with torch.no_grad():
            logits = reference.step(decoder, cache, batch, states)
    if states is not None and batch.slots is not None:
        states.end(batch.slots, batch.contexts)
    return logits
