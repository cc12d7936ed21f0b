"""Runs models on the CPU by `minifloat.kernels.decoder`: all layers of a step in one call."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import torch
from torch import Tensor

from minifloat.engine.cache import StateSnapshots, blocks_for
from minifloat.engine.scheduler import Runner, WorkItem
from minifloat.kernels.decoder import PARTS, Decoder, Experts, KVCache, SequenceStates, StepBatch, step

_NO_PREFIXES = (
    "its layers with a gated delta rule keep one state of each sequence, and there is no memory for copies of states"
)


class NativeRunner(Runner):
    name = "native"

    def __init__(
        self,
        decoder: Decoder,
        blocks: int,
        element: str,
        impl: str = "auto",
        *,
        slots: int = 1,
        snapshots: int = 0,
        cache: KVCache | None = None,
    ) -> None:
        self.decoder, self._impl = decoder, impl
        if cache is None:
            cache = KVCache(decoder.cache_shapes, blocks, element)
        self.cache = cache
        self.weight_bytes = round(_bytes_per_token(decoder))
        self.states = SequenceStates(decoder.state_floats, slots + snapshots) if decoder.state_floats else None
        if self.states is not None and snapshots:
            self.snapshots = StateSnapshots(self.states, range(slots, slots + snapshots))
        self.state_bytes = 0 if self.states is None else self.states.nbytes
        self.reason_no_prefixes = "" if self.states is None or snapshots else _NO_PREFIXES
        self.kv_element, self.kv_bytes = element, cache.nbytes
        self.vocab = decoder.lm_head.shape[0]
        self._nanoseconds = torch.zeros(len(PARTS), dtype=torch.int64)

    def drafting(self, decoder: Decoder, *, shares_cache: bool) -> NativeRunner:
        """Return a runner of a draft model, whose cache is that of this runner or has as many blocks."""
        cache = self.cache if shares_cache else None
        return NativeRunner(decoder, self.cache.blocks, self.kv_element, self._impl, cache=cache)

    def run(self, works: Sequences[WorkItem], memory: Tensor | None = None) -> Tensor:
        batch, parts = batch_of(works), self._nanoseconds
        return step(self.decoder, self.cache, batch, self._impl, self.states, nanoseconds=parts, memory=memory)

    def part_seconds(self) -> dict[str, float]:
        return {name: value / 1e9 for name, value in zip(PARTS, self._nanoseconds.tolist(), strict=True)}


def batch_of(works: Sequences[WorkItem]) -> StepBatch:
    tokens: list[int] = []
    positions: list[int] = []
    starts, contexts = [0], []
    logits: list[int] = []
    slots = [-1 if work.sequence.slot is None else work.sequence.slot for work in works]
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
        *(
            torch.tensor(values, dtype=torch.int32)
            for values in (tokens, positions, starts, contexts, blocks, logits, slots)
        )
    )


def _bytes_per_token(decoder: Decoder) -> float:
    """Return the bytes of the weights that one token is multiplied with; of experts only those that a token uses."""
    total: float = decoder.lm_head.nbytes + (decoder.inputs.projection.nbytes if decoder.inputs else 0)
    for layer in decoder.layers:
        mlp = layer.mlp
        weights = layer.attention.weights
        if isinstance(mlp, Experts):
            stacks = (*mlp.gate_up, mlp.down)
            total += sum(weight.nbytes for stack in stacks for weight in stack) * mlp.router.top_k / len(mlp.down)
            weights += [] if mlp.shared is None else [*mlp.shared.gate_up, mlp.shared.down]
        else:
            weights += [*mlp.gate_up, mlp.down]
        weights += [] if layer.input is None else [layer.input.gate, layer.input.out]
        total += sum(weight.nbytes for weight in weights)
    return total
