"""What fits: weights, KV cache and activations of one device against its memory.

Weights and caches are counted; activations are an estimate, since engines differ. For the tokens of one step it takes

    tokens x (2 hidden + (heads + 2 kv_heads) head_dim / gpus + 2 inner / gpus) x 2 bytes  +  batch x vocab x 4 bytes

which is the residual stream twice, queries, keys and values, both halves of the gated MLP (of all experts that a token
visits), and float32 logits. A step has `STEP_TOKENS` tokens while prompts are computed in pieces, or one for every
sequence. What runtimes, graphs and fragmentation take comes out of the share of the memory that is kept free.
"""

from __future__ import annotations

from dataclasses import dataclass

from minifloat.numerics.formats import BFLOAT16, FLOAT32, ElementFormat
from minifloat.plan.cache import cache_bytes
from minifloat.plan.hardware import Hardware
from minifloat.plan.roofline import largest
from minifloat.plan.shape import ModelShape

#: Tokens of a step in which prompts are computed in pieces (the default of vLLM's API server).
STEP_TOKENS = 2048
#: Where a search ends that nothing else bounds.
_MOST_SEQUENCES, _LONGEST_CONTEXT = 1 << 16, 1 << 24


def activation_bytes(shape: ModelShape, context: int, batch: int, gpus: int) -> int:
    """Bytes that a step needs beside weights and caches, on one device: the formula above."""
    tokens = max(batch, min(batch * context, STEP_TOKENS))
    heads = shape.heads // gpus + 2 * -(-shape.kv_heads // gpus)
    width = 2 * shape.hidden + heads * shape.query_dim + 2 * -(-shape.inner // gpus)
    return tokens * width * BFLOAT16.bits // 8 + batch * shape.vocab * FLOAT32.bits // 8


@dataclass(frozen=True)
class Room:
    """One device with a model on it.

    Attributes:
        hardware: The device.
        keep_free: The share of its memory that is left to everything that is not counted, 0 .. 1.
        shape: Of the model.
        weights: Bytes of the weights on it.
        element: Of the KV cache.
        gpus: Devices that share the model.
    """

    hardware: Hardware
    keep_free: float
    shape: ModelShape
    weights: int
    element: ElementFormat
    gpus: int

    @property
    def usable(self) -> int:
        """Bytes that may be taken."""
        return int(self.hardware.memory * (1 - self.keep_free))

    def cache(self, context: int, batch: int) -> int:
        """Bytes of the KV cache."""
        return batch * cache_bytes(self.shape.cache, context, self.element, self.gpus)

    def taken(self, context: int, batch: int) -> int:
        """Bytes of everything that is counted."""
        return self.weights + self.cache(context, batch) + activation_bytes(self.shape, context, batch, self.gpus)

    def fits(self, context: int, batch: int) -> bool:
        """Whether that may be taken."""
        return self.taken(context, batch) <= self.usable

    def largest_batch(self, context: int) -> int:
        """Sequences of so many tokens that fit; 0 where not even one does."""
        return largest(lambda batch: self.fits(context, batch), _MOST_SEQUENCES)

    def largest_context(self, batch: int) -> int:
        """Tokens that each of so many sequences may have, at most those that the model has positions for."""
        return largest(lambda context: self.fits(context, batch), self.shape.positions or _LONGEST_CONTEXT)
