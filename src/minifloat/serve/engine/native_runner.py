"""Runs models on the CPU by `minifloat.kernels.decoder`: all layers of a step in one call."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import torch
from torch import Tensor

from minifloat.kernels.decoder import Decoder, Experts, KVCache, StepBatch, step
from minifloat.serve.engine.cache import blocks_for
from minifloat.serve.engine.scheduler import WorkItem
from minifloat.serve.engine.sequence import Sequence
from minifloat.serve.engine.speculation.draft_item import DraftItem


class NativeRunner:
    """Runs the decoder of the CPU; a `minifloat.serve.engine.runner.Runner`.

    Args:
        decoder: The model.
        blocks: Number of blocks of the KV cache.
        element: Format of the keys and values, one of `minifloat.kernels.decoder.cache.ELEMENTS`.
        impl: As in `minifloat.kernels.decoder.step`.
        cache: The KV cache; None makes one.

    Attributes:
        decoder: The model.
        cache: The KV cache.
    """

    name = "native"

    def __init__(
        self, decoder: Decoder, blocks: int, element: str, impl: str = "auto", *, cache: KVCache | None = None
    ) -> None:
        self.decoder, self._impl = decoder, impl
        if cache is None:
            cache = KVCache(decoder.cache_shapes, blocks, element)
        self.cache = cache
        self.weight_bytes = round(_bytes_per_token(decoder))
        self.kv_element, self.kv_bytes = element, cache.nbytes
        self.vocab = decoder.lm_head.shape[0]

    def drafting(self, decoder: Decoder, *, shares_cache: bool) -> NativeRunner:
        """Return a runner of a draft model, whose cache is that of this runner or has as many blocks."""
        cache = self.cache if shares_cache else None
        return NativeRunner(decoder, self.cache.blocks, self.kv_element, self._impl, cache=cache)

    def run(self, works: Sequences[WorkItem | DraftItem]) -> Tensor:
        """Compute tokens, as `Runner.run`."""
        return step(self.decoder, self.cache, batch_of(works), impl=self._impl)

    def release(self, sequence: Sequence) -> None:
        """Do nothing: a sequence has no state but its blocks, which the scheduler owns."""


def batch_of(works: Sequences[WorkItem | DraftItem]) -> StepBatch:
    """Return the decoder's inputs for some work."""
    tokens: list[int] = []
    positions: list[int] = []
    starts, contexts = [0], []
    logits: list[int] = []
    width = max(len(work.sequence.blocks) for work in works)
    blocks = []
    for work in works:
        tokens += work.tokens
        positions += range(work.start, work.end)
        starts.append(len(tokens))
        contexts.append(work.end)
        used = work.sequence.blocks[: blocks_for(work.end)]
        blocks.append(used + [-1] * (width - len(used)))
        logits += range(len(tokens) - work.logits, len(tokens))
    return StepBatch(
        *(torch.tensor(values, dtype=torch.int32) for values in (tokens, positions, starts, contexts, blocks, logits))
    )


def _bytes_per_token(decoder: Decoder) -> float:
    """Return the bytes of the weights that one token is multiplied with; of experts only those that a token uses."""
    total: float = decoder.lm_head.nbytes
    for layer in decoder.layers:
        mlp = layer.mlp
        weights = [*layer.attention.qkv, layer.attention.out]
        if isinstance(mlp, Experts):
            stacks = (*mlp.gate_up, mlp.down)
            total += sum(weight.nbytes for stack in stacks for weight in stack) * mlp.router.top_k / len(mlp.down)
            weights += [] if mlp.shared is None else [*mlp.shared.gate_up, mlp.shared.down]
        else:
            weights += [*mlp.gate_up, mlp.down]
        total += sum(weight.nbytes for weight in weights)
    return total
