"""`step` runs the new tokens of a batch of sequences through all layers of a decoder, in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minifloat.errors import KernelUnavailable, ShapeError, UnknownNameError, UnsupportedTensorError
from minifloat.kernels.decoder import cpu, reference
from minifloat.kernels.decoder.attention import Attention, CacheShape, DeltaNet, Latent
from minifloat.kernels.decoder.cache import ELEMENTS, KVCache, SequenceStates
from minifloat.kernels.decoder.cpu import PARTS
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
    memory: Tensor | None = None,
) -> Tensor:
    """Put the new tokens of a batch into the cache and compute the requested logits.

    Logits may be written to `memory`, float32 ``[rows, vocab]``, where it has enough rows.
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
        logits = cpu.step(decoder, cache, batch, nanoseconds, states, memory)
    else:
        with torch.no_grad():
            logits = reference.step(decoder, cache, batch, states)
    if states is not None and batch.slots is not None:
        states.end(batch.slots, batch.contexts)
    return logits


# The block table separates sequences and bounds the memory accesses of kernels, so every entry that is read is checked.
_Array = NDArray[np.int32]
_RANKS = {"tokens": 1, "positions": 1, "starts": 1, "contexts": 1, "blocks": 2, "logits": 1}


def check(decoder: Decoder, cache: KVCache, batch: StepBatch, states: SequenceStates | None = None) -> None:
    if cache.shapes != decoder.cache_shapes:
        wanted, found = (_sizes(shapes) for shapes in (decoder.cache_shapes, cache.shapes))
        raise ShapeError("cache", f"expected layers of key-value heads and head size {wanted}, got {found}")
    tokens, positions, starts, contexts, blocks, logits = (_array(batch, name, rank) for name, rank in _RANKS.items())
    _check_range("tokens", tokens, decoder.vocab)
    _check_range("logits", logits, len(tokens))
    if positions.shape != tokens.shape:
        raise ShapeError("positions", f"expected {list(tokens.shape)}, got {list(positions.shape)}")
    if contexts.size < 1 or starts.size != contexts.size + 1 or blocks.shape[0] != contexts.size:
        actual = f"starts {starts.size}, contexts {contexts.size}, blocks {list(blocks.shape)}"
        raise ShapeError(
            "contexts", f"expected one for each sequence, as starts less 1 and rows of blocks; got {actual}"
        )
    counts = starts[1:] - starts[:-1]
    if starts[0] != 0 or starts[-1] != tokens.size or counts.min() < 1:
        raise ShapeError("starts", f"expected 0, rising, to {tokens.size}; got {starts.tolist()}")
    first = contexts - counts
    if first.min() < 0:
        raise ShapeError("contexts", f"expected at least the new tokens {counts.tolist()}, got {contexts.tolist()}")
    expected = np.arange(tokens.size, dtype=np.int32) + np.repeat(first - starts[:-1], counts)
    if not np.array_equal(positions, expected):
        at = int((positions != expected).argmax())
        raise ShapeError("positions", f"expected {expected[at]} for token {at}, got {positions[at]}")
    _check_blocks(cache, blocks, _first_key(decoder, first), first, contexts)
    if decoder.state_floats:
        _check_states(decoder, batch, states, first)


def _check_states(decoder: Decoder, batch: StepBatch, states: SequenceStates | None, first: _Array) -> None:
    if states is None or states.data.shape[1] != decoder.state_floats:
        found = None if states is None else states.data.shape[1]
        raise ShapeError("states", f"expected {decoder.state_floats} numbers of each sequence, got {found}")
    if batch.slots is None:
        raise ShapeError("slots", "expected a slot for each sequence, got None")
    slots = _array(batch, "slots", 1)
    if slots.shape != first.shape:
        raise ShapeError("slots", f"expected {list(first.shape)}, got {list(slots.shape)}")
    states.check(slots.tolist(), first.tolist())


def _sizes(shapes: Sequence[CacheShape]) -> str:
    """Return the sizes of some layers: how many, then heads and size of a head, and of the latent if there is one."""
    sizes = sorted({tuple(size for size in shape if size is not None) for shape in shapes})
    return f"{len(shapes)} of {sizes}"


def _first_key(decoder: Decoder, first: _Array) -> _Array:
    """Return the first position that a query at `first` or later sees in any layer."""
    windows = [layer.attention.window for layer in decoder.layers if isinstance(layer.attention, Attention)]
    sizes = [window for window in windows if window is not None]
    if len(sizes) < len(windows):
        return np.zeros_like(first)
    return np.maximum(first - (max(sizes) - 1), 0)


def _check_blocks(cache: KVCache, blocks: _Array, begin: _Array, first: _Array, contexts: _Array) -> None:
    """Validate that the blocks of keys from `begin` on exist, and that no two sequences write into the same block."""
    ends = -(-contexts // BLOCK_TOKENS)
    if ends.max() > blocks.shape[1]:
        sequence = int(ends.argmax())
        raise ShapeError(
            "blocks", f"expected {ends[sequence]} blocks for sequence {sequence}, got columns for {blocks.shape[1]}"
        )
    column = np.arange(blocks.shape[1], dtype=np.int32)
    used = (column >= (begin // BLOCK_TOKENS)[:, None]) & (column < ends[:, None])
    invalid = used & ((blocks < 0) | (blocks >= cache.blocks))
    if invalid.any():
        sequence, index = (int(i) for i in np.argwhere(invalid)[0])
        raise ShapeError(
            "blocks",
            f"expected a block 0 to {cache.blocks - 1} for sequence {sequence}, entry {index}; "
            f"got {blocks[sequence, index]}",
        )
    written = np.sort(blocks[used & (column >= (first // BLOCK_TOKENS)[:, None])])
    twice = written[1:] == written[:-1]
    if twice.any():
        raise ShapeError("blocks", f"block {written[1:][twice][0]} would be written twice")


def _array(batch: StepBatch, name: str, rank: int) -> _Array:
    tensor = getattr(batch, name)
    if tensor.dtype != torch.int32 or not tensor.is_cpu or not tensor.is_contiguous():
        actual = f"{tensor.dtype} on {tensor.device}{'' if tensor.is_contiguous() else ', not contiguous'}"
        raise UnsupportedTensorError(name, f"expected contiguous int32 on the CPU, got {actual}")
    if tensor.ndim != rank:
        raise ShapeError(name, f"expected {rank} dimensions, got {list(tensor.shape)}")
    array: _Array = tensor.numpy()
    return array


def _check_range(name: str, values: _Array, end: int) -> None:
    if values.size and (values.min() < 0 or values.max() >= end):
        raise ShapeError(name, f"expected 0 to {end - 1}, got {values.min()} to {values.max()}")
