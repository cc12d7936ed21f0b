"""Bytes and operations of the caches of a sequence: keys and values of every token, latents (MLA), and states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from minifloat.numerics.formats import ElementFormat

#: Tokens of a block of our engine's cache (`kernels.decoder.BLOCK_TOKENS`, without its imports).
ENGINE_BLOCK = 16
#: Least operations per token and element of a recurrent state: one multiplication by the decay, one multiplication and
#: addition to update the element, and one to read it. The delta rule reads it a second time.
STATE_OPERATIONS = 5


@dataclass(frozen=True)
class CacheLayer:
    """The KV cache of one layer."""

    heads: int
    width: int
    operations: int
    window: int | None = None  # number of tokens that are kept; None: all, 0: none
    state: int = 0
    state_operations: int = 0

    def with_window(self, window: int | None) -> CacheLayer:
        """Return the layer with another window."""
        return replace(self, heads=0, width=0, operations=0) if window == 0 else replace(self, window=window)

    def cached_tokens(self, tokens: int) -> int:
        """Return the number of tokens of a sequence of `tokens` that stay in the cache."""
        return tokens if self.window is None else min(tokens, self.window)

    def elements(self, gpus: int) -> int:
        """Return the elements of a token on one device; heads are copied where there are fewer heads than devices."""
        return self.width * (-(-self.heads // gpus) if self.heads else 1)


def cache_bytes(layers: Sequence[CacheLayer], tokens: int, element: ElementFormat, gpus: int = 1) -> int:
    """Return the bytes of the keys and values of one sequence on one of `gpus` devices."""
    return sum(layer.cached_tokens(tokens) * layer.elements(gpus) for layer in layers) * element.bits // 8


def state_bytes(layers: Sequence[CacheLayer], gpus: int = 1) -> int:
    """Return the bytes of the states of one sequence on one of `gpus` devices."""
    return sum(-(-layer.state // gpus) for layer in layers)


def attention_operations(layers: Sequence[CacheLayer], tokens: int) -> int:
    """Return the operations of attention for one new token, the last of `tokens`."""
    return sum(layer.cached_tokens(tokens) * layer.operations + layer.state_operations for layer in layers)


def prefill_operations(layers: Sequence[CacheLayer], tokens: int) -> int:
    """Return the operations of attention for a prompt, in which each token attends to itself and earlier tokens."""
    total = 0
    for layer in layers:
        cached = layer.cached_tokens(tokens)
        total += layer.operations * (cached * (cached + 1) // 2 + (tokens - cached) * cached)
        total += layer.state_operations * tokens
    return total
