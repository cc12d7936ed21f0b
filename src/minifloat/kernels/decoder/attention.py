"""`Attention`: softmax attention, latent attention (MLA) too; and `DeltaNet`, the gated delta rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from minifloat.errors import ShapeError, UnknownNameError, UnsupportedTensorError
from minifloat.kernels.decoder.norm import Norm, Rotary, expect, expect_biases, expect_weights
from minifloat.kernels.decoder_layout import VALUES, AttentionOptions, DeltaOptions
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.native import CONSTANTS
from minifloat.kernels.pack import FusedWeights, PackedWeight

# In latent attention (MLA) a token has one latent c and one rotated key r, from which a head h has the key ``[K_h c |
# r]`` and the value ``V_h c``. With ``K_h`` multiplied into the query, all heads attend to the one key ``[c | r]``: the
# cache holds c and r once for all heads. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.

#: Multiplies rows with a packed weight.
_Multiply = Callable[[Tensor, PackedWeight], Tensor]


class CacheShape(NamedTuple):
    """The keys and values of a layer."""

    kv_heads: int
    head_dim: int
    latent: int | None = None  #: number of dimensions of a key that are its value too, which is not stored again


@dataclass(frozen=True, eq=False)
class Latent:
    """The matrices of latent attention beside `Attention.qkv` and `Attention.out`."""

    keys: PackedExperts  #: for each head the transposed ``K_h``, ``[rank, plain]``
    values: PackedExperts  #: for each head ``V_h``, ``[value_dim, rank]``
    key_factors: Tensor | None = None  #: float32 ``[heads, plain]``, which multiply the queries before `keys` does
    kv_norm: Norm | None = None  #: a norm of the latent, ``[rank]``, or None
    q_up: PackedWeight | None = None  #: makes q of what `Attention.qkv` has in its place
    q_norm: Norm | None = None  #: a norm of the input of `q_up`, or None

    @property
    def rank(self) -> int:
        return self.keys.shape[0]

    @property
    def plain(self) -> int:
        """Dimensions of a query that do not turn."""
        return self.keys.shape[1]

    @property
    def value_dim(self) -> int:
        return self.values.shape[0]

    @property
    def q_rank(self) -> int:
        """Columns of `q_up`; 0: there is none."""
        return 0 if self.q_up is None else self.q_up.shape[1]

    @property
    def weights(self) -> list[PackedWeight]:
        return [*([] if self.q_up is None else [self.q_up]), *self.keys, *self.values]

    def query_dim(self, head_dim: int) -> int:
        """Return the size of a query before `keys` multiplies it; `head_dim`: of the cached key."""
        return self.plain + head_dim - self.rank

    def check(self, name: str, heads: int, head_dim: int) -> None:
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
            expect_weights(f"{name}.q_up", (self.q_up,), heads * self.query_dim(head_dim), self.q_rank)
        if self.q_norm is not None:
            if self.q_up is None:
                raise ShapeError(f"{name}.q_norm", "expected None where there is no q_up")
            self.q_norm.check(f"{name}.q_norm", self.q_rank)

    def multiplied(self, plain: Tensor, multiply: _Multiply) -> Tensor:
        """Return the part of queries that the latents are multiplied with, in plain PyTorch."""
        if self.key_factors is not None:
            plain = (plain.float() * self.key_factors).to(plain.dtype)
        return torch.stack([multiply(plain[:, h], weight) for h, weight in enumerate(self.keys)], dim=1)

    def expanded(self, attended: Tensor, multiply: _Multiply) -> Tensor:
        """Return the values ``[T, heads, value_dim]`` of attended latents ``[T, heads, rank]``, as `multiplied`."""
        return torch.stack([multiply(attended[:, h], weight) for h, weight in enumerate(self.values)], dim=1)


@dataclass(frozen=True, eq=False)
class Attention(AttentionOptions):
    qkv: FusedWeights  #: rows of q ``[heads * d, hidden]``, twice as many if `gated`, of k and v; one to three weights
    out: PackedWeight  #: ``[hidden, heads * d]``
    qkv_bias: tuple[Tensor | None, ...] | None = None  #: a bias or None for each weight of `qkv`, of one dtype; or None
    out_bias: Tensor | None = None  #: ``[hidden]`` or None
    rotary: Rotary | None = None  #: the rotary embedding of q and k, or None
    q_norm: Norm | None = None  #: before the rotation; its weight is ``[d]`` for all heads, or ``[heads * d]``
    k_norm: Norm | None = None
    v_norm: Norm | None = None  #: a norm of the values of each head, ``[d]``, or None
    sinks: Tensor | None = None  #: float32 ``[heads]``: scores that take part in the softmax and have no value
    latent: Latent | None = None  #: the matrices of latent attention, with ``values="latent"``; else None
    k_scale: float = 1.0
    v_scale: float = 1.0

    MAX_HEAD_DIM = CONSTANTS["MAX_HEAD_DIM"]

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.kv_heads, self.head_dim, None if self.latent is None else self.latent.rank)

    @property
    def result_dim(self) -> int:
        """Columns of `out` for each head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def weights(self) -> list[PackedWeight]:
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
                norm.check(f"{name}.{field}", count * d if self.head_weights else d)
        if self.v_norm is not None:
            self.v_norm.check(f"{name}.v_norm", d)
        if self.sinks is not None:
            expect(f"{name}.sinks", self.sinks, (heads,))

    @property
    def head_weights(self) -> bool:
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


# Each value head keeps a matrix ``[k_dim, v_dim]`` of each sequence, which a token changes:
#     state *= exp(-decay * softplus(a + dt_bias))
#     state += outer(k, sigmoid(b) * (v - k @ state))
#     out    = q @ state
# Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464); transformers, ``modeling_qwen3_next.py``.

#: Columns of a state are padded to a multiple of this.
_VECTOR = 16
_NORM_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class DeltaNet(DeltaOptions):
    qkvz: FusedWeights  #: the rows of q, k ``[k_heads * k_dim, hidden]``, v and z ``[v_heads * v_dim, hidden]``
    ba: FusedWeights  #: the rows of b and a, ``[v_heads, hidden]`` each
    out: PackedWeight  #: ``[hidden, v_heads * v_dim]``
    conv: Tensor  #: float32 ``[width, channels]``, the factors of the oldest token first
    decay: Tensor  #: float32 ``[v_heads]``: exp(A_log)
    dt_bias: Tensor  #: float32 ``[v_heads]``
    norm: Norm  #: the norm of the results of each head, ``[v_dim]``

    @property
    def weights(self) -> list[PackedWeight]:
        return [*self.qkvz, *self.ba, self.out]

    @property
    def conv_width(self) -> int:
        return self.conv.shape[0]

    @property
    def sections(self) -> list[int]:
        keys = self.k_heads * self.k_dim
        return [keys, keys, self.v_heads * self.v_dim]

    @property
    def channels(self) -> int:
        return sum(self.sections)

    @property
    def state_floats(self) -> int:
        """Size of the state of a sequence: inputs of the convolution, then the matrices, each padded to vectors."""
        return self._matrices_at + self.v_heads * self.k_dim * _padded(self.v_dim)

    @property
    def _matrices_at(self) -> int:
        return _padded((self.conv_width - 1) * self.channels)

    def check(self, name: str, hidden: int) -> None:
        for field in ("k_heads", "v_heads", "k_dim", "v_dim"):
            if getattr(self, field) < 1:
                raise ShapeError(f"{name}.{field}", f"expected at least 1, got {getattr(self, field)}")
        if self.v_heads % self.k_heads:
            raise ShapeError(f"{name}.v_heads", f"expected a multiple of {self.k_heads} key heads, got {self.v_heads}")
        if self.conv.ndim != 2 or self.conv_width < 1:
            raise ShapeError(f"{name}.conv", f"expected [width, {self.channels}], got {list(self.conv.shape)}")
        results = self.sections[2]
        expect_weights(f"{name}.qkvz", self.qkvz, self.channels + results, hidden)
        expect_weights(f"{name}.ba", self.ba, 2 * self.v_heads, hidden)
        expect_weights(f"{name}.out", (self.out,), hidden, results)
        expect(f"{name}.conv", self.conv, (self.conv_width, self.channels))
        expect(f"{name}.decay", self.decay, (self.v_heads,))
        expect(f"{name}.dt_bias", self.dt_bias, (self.v_heads,))
        self.norm.check(f"{name}.norm", self.v_dim)

    def split(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Split the rows of both products into the channels of the convolution, z, b and a."""
        count, sizes = len(qkvz), [*self.sections, self.sections[2]]
        if not self.grouped:
            *parts, z = torch.split_with_sizes(qkvz, sizes, dim=-1)
            b, a = ba.chunk(2, dim=-1)
        else:
            grouped = qkvz.view(count, self.k_heads, -1)
            split = torch.split_with_sizes(grouped, [size // self.k_heads for size in sizes], dim=-1)
            *parts, z = (part.flatten(1) for part in split)
            b, a = (part.flatten(1) for part in ba.view(count, self.k_heads, -1).chunk(2, dim=-1))
        return torch.cat(parts, dim=-1), z.reshape(count, self.v_heads, self.v_dim), b, a

    def run(self, inputs: Tensor, z: Tensor, b: Tensor, a: Tensor, state: Tensor) -> Tensor:
        """Compute the tokens of one sequence, in plain PyTorch."""
        before = state[: (self.conv_width - 1) * self.channels].view(self.conv_width - 1, self.channels)
        window = torch.cat([before, inputs])
        before.copy_(window[len(inputs) :])
        mixed = functional.silu((window.unfold(0, self.conv_width, 1) * self.conv.T).sum(dim=-1))
        q, k, v = torch.split_with_sizes(mixed, self.sections, dim=-1)
        group = self.v_heads // self.k_heads
        q, k = (_unit(x.view(len(x), -1, self.k_dim)).repeat_interleave(group, dim=1) for x in (q, k))
        v = v.view(len(v), self.v_heads, self.v_dim)
        decay, beta = torch.exp(-self.decay * functional.softplus(a + self.dt_bias)), b.sigmoid()
        matrices = state[self._matrices_at :].view(self.v_heads, self.k_dim, -1)[..., : self.v_dim]
        out = torch.empty_like(v)
        for t in range(len(v)):
            matrices.mul_(decay[t, :, None, None])
            known = torch.einsum("hkv,hk->hv", matrices, k[t])
            matrices.add_(k[t, :, :, None] * ((v[t] - known) * beta[t, :, None])[:, None])
            out[t] = torch.einsum("hkv,hk->hv", matrices, q[t] * self.k_dim**-0.5)
        return (self.norm(out) * functional.silu(z)).flatten(1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _NORM_EPS)


def _padded(count: int) -> int:
    return -(-count // _VECTOR) * _VECTOR
