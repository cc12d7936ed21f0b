"""What a KV cache costs: keys and values of every token, or one latent where attention compresses them (MLA).

A layer with a sliding window keeps no more tokens than the window, in engines that free what lies behind it (vLLM,
SGLang). Left out: that engines give memory in blocks of tokens, the padding of heads that are not a multiple of 16 in
our own engine, and the state of layers without keys and values (linear attention, Mamba). For full attention
`kernels.decoder.KVCache` allocates these same bytes, which a test holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from minifloat.numerics.formats import ElementFormat

#: Tokens of a block of our engine, which holds whole blocks (`kernels.decoder.BLOCK_TOKENS`, without its imports).
ENGINE_BLOCK = 16


@dataclass(frozen=True)
class CacheLayer:
    """One layer.

    Attributes:
        heads: Of keys and values, which tensor parallelism divides; 0: one latent, of which every device has a copy.
        width: Elements of a token and head (key and value), or of the latent.
        operations: Of attention per token that is looked at, over all heads of queries.
        window: Tokens that are kept: None for all, 0 for none.
    """

    heads: int
    width: int
    operations: int
    window: int | None = None

    def with_window(self, window: int | None) -> CacheLayer:
        """The same with another window."""
        return replace(self, heads=0, width=0, operations=0) if window == 0 else replace(self, window=window)

    def kept(self, tokens: int) -> int:
        """Of so many tokens, those that are kept."""
        return tokens if self.window is None else min(tokens, self.window)

    def elements(self, gpus: int) -> int:
        """Elements of a token on one device: heads are divided, and copied where there are fewer heads than devices."""
        return self.width * (-(-self.heads // gpus) if self.heads else 1)


def cache_bytes(layers: Sequence[CacheLayer], tokens: int, element: ElementFormat, gpus: int = 1) -> int:
    """Bytes of the keys and values of one sequence, on one of `gpus` devices."""
    return sum(layer.kept(tokens) * layer.elements(gpus) for layer in layers) * element.bits // 8


def attention_operations(layers: Sequence[CacheLayer], tokens: int) -> int:
    """Operations of the attention of one new token that is the last of `tokens`."""
    return sum(layer.kept(tokens) * layer.operations for layer in layers)


def prefill_operations(layers: Sequence[CacheLayer], tokens: int) -> int:
    """Operations of the attention of a whole prompt: each token looks at itself and those before it."""
    total = 0
    for layer in layers:
        kept = layer.kept(tokens)
        total += layer.operations * (kept * (kept + 1) // 2 + (tokens - kept) * kept)
    return total
