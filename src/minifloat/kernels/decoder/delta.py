"""`DeltaNet`: the gated delta rule, a linear attention whose memory of a sequence has a fixed size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from minifloat.errors import ShapeError
from minifloat.kernels.decoder.norm import Norm, expect, expect_weights
from minifloat.kernels.decoder_layout import DeltaOptions
from minifloat.kernels.pack import FusedWeights, PackedWeight

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
    """The gated delta rule of a layer."""

    qkvz: FusedWeights  #: the rows of q, k ``[k_heads * k_dim, hidden]``, v and z ``[v_heads * v_dim, hidden]``
    ba: FusedWeights  #: the rows of b and a, ``[v_heads, hidden]`` each
    out: PackedWeight  #: ``[hidden, v_heads * v_dim]``
    conv: Tensor  #: float32 ``[width, channels]``, the factors of the oldest token first
    decay: Tensor  #: float32 ``[v_heads]``: exp(A_log)
    dt_bias: Tensor  #: float32 ``[v_heads]``
    norm: Norm  #: the norm of the results of each head, ``[v_dim]``

    @property
    def weights(self) -> list[PackedWeight]:
        """All packed weights."""
        return [*self.qkvz, *self.ba, self.out]

    @property
    def conv_width(self) -> int:
        """Number of tokens that the convolution sees."""
        return self.conv.shape[0]

    @property
    def sections(self) -> list[int]:
        """Channels of q, k and v."""
        keys = self.k_heads * self.k_dim
        return [keys, keys, self.v_heads * self.v_dim]

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return sum(self.sections)

    @property
    def state_floats(self) -> int:
        """Size of the state of a sequence: inputs of the convolution, then the matrices, each padded to vectors."""
        return self._matrices_at + self.v_heads * self.k_dim * _padded(self.v_dim)

    @property
    def _matrices_at(self) -> int:
        return _padded((self.conv_width - 1) * self.channels)

    def check(self, name: str, hidden: int) -> None:
        """Validate sizes and dtypes; `name` is the prefix of field names in errors."""
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
