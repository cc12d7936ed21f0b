"""`step` runs the new tokens of a batch of sequences through all layers of a decoder, in one call."""

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
    """Put the new tokens of a batch into the cache and compute the requested logits."""
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
