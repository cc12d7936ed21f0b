"""`Latent`: what latent attention (MLA) has in the place of keys and values of each head.

A token has one latent c ``[rank]`` and one rotated key r, from which a head h has its key ``[K_h c | r]`` and its value
``V_h c``. With ``K_h`` multiplied into the query, all heads attend to the same key ``[c | r]`` and to the value c, and
``V_h`` multiplies the result once: the cache holds c and r alone, once for all heads, and keys of heads are never made.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; the products in this order are in its appendix C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.errors import ShapeError
from minifloat.kernels.decoder.expect import expect, expect_weights
from minifloat.kernels.decoder.norm import Norm
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.pack import PackedWeight

#: Multiplies rows with a packed weight.
_Multiply = Callable[[Tensor, PackedWeight], Tensor]


@dataclass(frozen=True, eq=False)
class Latent:
    """The matrices of latent attention beside `Attention.qkv` and `Attention.out`.

    Attributes:
        keys: For each head the transposed ``K_h``, ``[rank, plain]``; `plain`: dimensions of a query that do not turn.
        values: For each head ``V_h``, ``[value_dim, rank]``.
        key_factors: float32 ``[heads, plain]``, which multiply the queries before `keys` does: scales of the rows of
            ``K_h``, which are columns here; or None.
        kv_norm: A norm of the latent, ``[rank]``, or None.
        q_up: ``[heads * (plain + turned), q_rank]``: makes the queries of what `Attention.qkv` has in their place; or
            None.
        q_norm: A norm of the input of `q_up`, or None.
    """

    keys: PackedExperts
    values: PackedExperts
    key_factors: Tensor | None = None
    kv_norm: Norm | None = None
    q_up: PackedWeight | None = None
    q_norm: Norm | None = None

    @property
    def rank(self) -> int:
        """Size of the latent."""
        return self.keys.shape[0]

    @property
    def plain(self) -> int:
        """Dimensions of a query that do not turn."""
        return self.keys.shape[1]

    @property
    def value_dim(self) -> int:
        """Size of the value of a head."""
        return self.values.shape[0]

    @property
    def weights(self) -> list[PackedWeight]:
        """All packed weights."""
        return [*([] if self.q_up is None else [self.q_up]), *self.keys, *self.values]

    def query_dim(self, head_dim: int) -> int:
        """Return the size of a query before `keys` multiplies it; `head_dim`: of the cached key."""
        return self.plain + head_dim - self.rank

    def check(self, name: str, heads: int, head_dim: int) -> None:
        """Validate sizes and dtypes; `name` is the prefix of field names in errors."""
        counts = {"keys": len(self.keys), "values": len(self.values)}
        for field, count in counts.items():
            if count != heads:
                raise ShapeError(f"{name}.{field}", f"expected a weight for each of {heads} heads, got {count}")
        if not 2 <= self.rank <= head_dim or self.rank % 2:
            raise ShapeError(f"{name}.keys", f"expected an even number of rows up to {head_dim}, got {self.rank}")
        if self.values.shape[1] != self.rank:
            raise ShapeError(f"{name}.values", f"expected {self.rank} columns, got {list(self.values.shape)}")
        if self.key_factors is not None:
            expect(f"{name}.key_factors", self.key_factors, (heads, self.plain))
        if self.kv_norm is not None:
            self.kv_norm.check(f"{name}.kv_norm", self.rank)
        if self.q_up is not None:
            cols = self.q_up.shape[1]
            expect_weights(f"{name}.q_up", (self.q_up,), heads * self.query_dim(head_dim), cols)
        if self.q_norm is not None:
            if self.q_up is None:
                raise ShapeError(f"{name}.q_norm", "expected None where there is no q_up")
            self.q_norm.check(f"{name}.q_norm", self.q_up.shape[1])

    def multiplied(self, plain: Tensor, multiply: _Multiply) -> Tensor:
        """Return the part of queries that the latents are multiplied with, in plain PyTorch."""
        if self.key_factors is not None:
            plain = (plain.float() * self.key_factors).to(plain.dtype)
        return torch.stack([multiply(plain[:, h], weight) for h, weight in enumerate(self.keys)], dim=1)

    def expanded(self, attended: Tensor, multiply: _Multiply) -> Tensor:
        """Return the values ``[T, heads, value_dim]`` of attended latents ``[T, heads, rank]``, as `multiplied`."""
        return torch.stack([multiply(attended[:, h], weight) for h, weight in enumerate(self.values)], dim=1)
