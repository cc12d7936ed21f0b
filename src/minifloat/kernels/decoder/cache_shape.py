"""`CacheShape`: what one layer has in a cache of keys and values."""

from __future__ import annotations

from typing import NamedTuple


class CacheShape(NamedTuple):
    """The keys and values of a layer.

    Attributes:
        latent: Number of dimensions of a key that are its value too, which is not stored again; None: values are.
    """

    kv_heads: int
    head_dim: int
    latent: int | None = None
