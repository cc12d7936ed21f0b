"""`Attention`: softmax attention of grouped queries, with all that models add to it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minifloat.errors import ShapeError, UnknownNameError, UnsupportedTensorError
from minifloat.kernels.decoder.cache_shape import CacheShape
from minifloat.kernels.decoder.expect import expect, expect_biases, expect_weights
from minifloat.kernels.decoder.latent import Latent
from minifloat.kernels.decoder.norm import Norm
from minifloat.kernels.decoder.rotary import Rotary
from minifloat.kernels.pack import FusedWeights, PackedWeight

#: Where values come from, in the order of ``enum minifloat_values``: rows of `Attention.qkv`; the keys, before their
#: norm and rotation; with the keys, the cache of another layer; the latent, which is the first part of the cached key.
VALUES = ("own", "keys", "shared", "latent")


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention of a layer.

    Attributes:
        qkv: The rows of q ``[heads * d, hidden]``, twice as many if `gated`, k and v ``[kv_heads * d, hidden]``, in one
            to three weights. Without values of its own, the layer has no rows of v; with those of another layer, none
            of k.
        qkv_bias: A bias or None for each weight of `qkv`, of one dtype; or None.
        out: ``[hidden, heads * d]``.
        out_bias: ``[hidden]`` or None.
        rotary: The rotary embedding of q and k, or None.
        q_norm: A norm of q before the rotation, or None. Its weight is ``[d]`` for all heads, or ``[heads * d]``.
        v_norm: A norm of the values of each head, ``[d]``, or None.
        window: A query sees the last `window` keys, its own included; None for all keys up to its own.
        sinks: float32 ``[heads]``: a score of each head that takes part in the softmax and has no value; or None.
        score_cap: Scores become ``cap * tanh(score / cap)``; None: they do not.
        clip: q, k and v are clamped to this magnitude after their products; None: they are not.
        latent: The matrices of latent attention, with ``values="latent"``; else None. There is one key-value head of
            ``[latent | turned]``, and `head_dim` is its size. Rows of `qkv` are those of q, ``[heads * (plain +
            turned), hidden]``, or what `Latent.q_up` makes q of, and of the key, ``[head_dim, hidden]``; `out` is
            ``[hidden, heads * value_dim]``. There are no other norms, no clipping and no gates.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv: FusedWeights
    out: PackedWeight
    qkv_bias: tuple[Tensor | None, ...] | None = None
    out_bias: Tensor | None = None
    rotary: Rotary | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    whole_norms: bool = False
    window: int | None = None
    sinks: Tensor | None = None
    score_cap: float | None = None
    clip: float | None = None
    gated: bool = False
    values: str = "own"
    latent: Latent | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    MAX_HEAD_DIM = 576

    @property
    def cache_shape(self) -> CacheShape:
        """The shape of the layer's keys and values in the cache."""
        return CacheShape(self.kv_heads, self.head_dim, None if self.latent is None else self.latent.rank)

    @property
    def result_dim(self) -> int:
        """Columns of `out` for each head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def weights(self) -> list[PackedWeight]:
        """All packed weights."""
        return [*self.qkv, self.out, *([] if self.latent is None else self.latent.weights)]

    @property
    def sections(self) -> list[int]:
        """Rows of q, k and v in `qkv`; as many of them as there are."""
        if self.latent is not None:
            up = self.latent.q_up
            low = self.heads * self.latent.query_dim(self.head_dim) if up is None else up.shape[1]
            return [low, self.head_dim]
        rows = self.kv_heads * self.head_dim
        queries = self.heads * self.head_dim * (2 if self.gated else 1)
        return [queries, *[rows] * {"own": 2, "keys": 1}.get(self.values, 0)]

    def check(self, name: str, hidden: int) -> None:
        """Validate sizes and dtypes; `name` is the prefix of field names in errors."""
        self._check_sizes(name)
        if self.values not in VALUES:
            raise UnknownNameError(f"{name}.values", self.values, VALUES)
        if self.gated and (self.whole_norms or self.clip is not None):
            raise UnsupportedTensorError(f"{name}.gated", "expected neither norms over all heads nor clipped heads")
        d, heads = self.head_dim, self.heads
        self._check_latent(name)
        expect_weights(f"{name}.qkv", self.qkv, sum(self.sections), hidden)
        expect_biases(f"{name}.qkv_bias", self.qkv_bias, self.qkv)
        expect_weights(f"{name}.out", (self.out,), hidden, heads * self.result_dim)
        expect_biases(f"{name}.out_bias", (self.out_bias,), (self.out,))
        if self.rotary is not None:
            self.rotary.check(f"{name}.rotary.inv_freq", d if self.latent is None else d - self.latent.rank)
        for field, norm, count in (("q_norm", self.q_norm, heads), ("k_norm", self.k_norm, self.kv_heads)):
            if norm is not None:
                norm.check(f"{name}.{field}", count * d if self.has_head_weights else d)
        if self.v_norm is not None:
            self.v_norm.check(f"{name}.v_norm", d)
        if self.sinks is not None:
            expect(f"{name}.sinks", self.sinks, (heads,))

    @property
    def has_head_weights(self) -> bool:
        """Whether the norms of q and k have a weight of their own for each head."""
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        return self.whole_norms or any(norm.weight.numel() != self.head_dim for norm in norms)

    def _check_latent(self, name: str) -> None:
        if (self.latent is not None) != (self.values == "latent"):
            raise UnsupportedTensorError(f"{name}.latent", 'expected one with values="latent", else None')
        if self.latent is None:
            return
        if self.kv_heads != 1:
            raise ShapeError(f"{name}.kv_heads", f"expected 1 for latent attention, got {self.kv_heads}")
        others = (self.q_norm, self.k_norm, self.v_norm, self.clip)
        if self.gated or any(other is not None for other in others):
            raise UnsupportedTensorError(f"{name}.latent", "expected no norms of heads, clipping and gates beside it")
        self.latent.check(f"{name}.latent", self.heads, self.head_dim)

    def _check_sizes(self, name: str) -> None:
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise ShapeError(
                f"{name}.heads", f"expected a multiple of {self.kv_heads} key-value heads, got {self.heads}"
            )
        if not 2 <= self.head_dim <= self.MAX_HEAD_DIM or self.head_dim % 2:
            raise ShapeError(
                f"{name}.head_dim", f"expected an even number up to {self.MAX_HEAD_DIM}, got {self.head_dim}"
            )
        if self.window is not None and self.window < 1:
            raise ShapeError(f"{name}.window", f"expected at least 1, got {self.window}")
        positive = {"k_scale": self.k_scale, "v_scale": self.v_scale, "score_cap": self.score_cap, "clip": self.clip}
        for field, value in positive.items():
            if value is not None and not 0.0 < value < float("inf"):
                raise UnsupportedTensorError(f"{name}.{field}", f"expected a positive number, got {value}")
