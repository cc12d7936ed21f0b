"""Whether a model fits: weights, KV cache and activations of one device against its memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from minifloat.deploy.estimate.cache import cache_bytes, state_bytes
from minifloat.deploy.estimate.hardware import Hardware
from minifloat.deploy.estimate.shape import ModelShape
from minifloat.deploy.estimate.weights import check_parallel
from minifloat.errors import UsageError
from minifloat.numerics.formats import BFLOAT16, FLOAT32, ElementFormat

#: Tokens of a step of chunked prefill (the default of vLLM's API server).
STEP_TOKENS = 2048
#: Upper limits of searches that nothing else bounds.
_MOST_SEQUENCES, _LONGEST_CONTEXT = 1 << 16, 1 << 24
#: Devices up to which `devices_needed` searches.
MOST_DEVICES = 64


def activation_bytes(shape: ModelShape, context: int, batch: int, gpus: int) -> int:
    """Return the estimated bytes of activations of a step on one device."""
    # The residual stream twice; queries, keys and values; both halves of the gated MLP; float32 logits.
    tokens = max(batch, min(batch * context, STEP_TOKENS))
    heads = shape.heads // gpus + 2 * -(-shape.kv_heads // gpus)
    width = 2 * shape.hidden + heads * shape.query_dim + 2 * -(-shape.inner // gpus)
    return tokens * width * BFLOAT16.bits // 8 + batch * shape.vocab * FLOAT32.bits // 8


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device that holds a model."""

    hardware: Hardware
    keep_free: float
    shape: ModelShape
    weights: int
    element: ElementFormat
    gpus: int

    @property
    def usable(self) -> int:
        """Bytes for weights, KV cache and activations."""
        return int(self.hardware.memory * (1 - self.keep_free))

    def cache(self, context: int, batch: int) -> int:
        """Return the bytes of the KV cache and states of `batch` sequences of `context` tokens."""
        layers = self.shape.cache
        return batch * (cache_bytes(layers, context, self.element, self.gpus) + state_bytes(layers, self.gpus))

    def taken(self, context: int, batch: int) -> int:
        """Return the bytes of weights, KV cache and activations."""
        return self.weights + self.cache(context, batch) + activation_bytes(self.shape, context, batch, self.gpus)

    def fits(self, context: int, batch: int) -> bool:
        """Return whether `batch` sequences of `context` tokens fit."""
        return self.taken(context, batch) <= self.usable

    def largest_batch(self, context: int) -> int:
        """Return the largest number of sequences of `context` tokens that fit; 0: not even one fits."""
        return _largest(lambda batch: self.fits(context, batch), _MOST_SEQUENCES)

    def largest_context(self, batch: int) -> int:
        """Return the largest number of tokens that each of `batch` sequences may have, up to the model's positions."""
        return _largest(lambda context: self.fits(context, batch), self.shape.positions or _LONGEST_CONTEXT)


def devices_needed(shape: ModelShape, more_than: int, fits: Callable[[int], bool]) -> int | None:
    """Return the smallest number of devices that can share a model by tensor parallelism and hold it."""
    for number in range(more_than + 1, MOST_DEVICES + 1):
        try:
            check_parallel(shape, number)
        except UsageError:
            continue
        if fits(number):
            return number
    return None


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to `limit` for which `holds` is true, or 0; it must be true below that."""
    return bisect_left(range(1, limit + 1), True, key=lambda number: not holds(number))
