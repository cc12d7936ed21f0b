"""`Mlp`; `Experts`, of which each token uses some, with the `Router` that chooses them; and `LayerInput`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from minifloat.errors import ShapeError, UnknownNameError, UnsupportedTensorError
from minifloat.kernels.decoder.norm import Norm, expect, expect_biases, expect_weights
from minifloat.kernels.decoder_layout import ROUTERS, SILU, Activation, LayerInputsOptions, RouterOptions
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.pack import FusedWeights, PackedWeight


@dataclass(frozen=True, eq=False)
class Mlp:
    """``down(function(gate(x)) * up(x))``, or ``down(function(up(x)))``."""

    gate_up: FusedWeights  #: the rows of gate and up, ``[intermediate, hidden]`` each, in one or two weights
    down: PackedWeight  #: ``[hidden, intermediate]``
    gate_up_bias: tuple[Tensor | None, ...] | None = None  #: a bias or None for each weight of `gate_up`, of one dtype
    down_bias: Tensor | None = None  #: ``[hidden]`` or None
    activation: Activation = SILU

    @property
    def intermediate(self) -> int:
        return self.down.shape[1]

    def check(self, name: str, hidden: int) -> None:
        self.activation.check(name)
        expect_weights(f"{name}.down", (self.down,), hidden, self.intermediate)
        expect_weights(f"{name}.gate_up", self.gate_up, self.activation.inputs * self.intermediate, hidden)
        expect_biases(f"{name}.gate_up_bias", self.gate_up_bias, self.gate_up)
        expect_biases(f"{name}.down_bias", (self.down_bias,), (self.down,))


@dataclass(frozen=True, eq=False)
class Router(RouterOptions):
    """Chooses the experts of a token, ties to the lower number; all in float32."""

    weight: Tensor  #: ``[experts, hidden]``, float32 or bfloat16
    bias: Tensor | None = None  #: float32 ``[experts]``, added to the products; or None
    correction: Tensor | None = None  #: float32 ``[experts]``, added to the scores for the choice alone; or None
    scales: Tensor | None = None  #: float32 ``[experts]``, factors of the weights of experts after all else

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def experts(self) -> int:
        return self.weight.shape[0]

    def check(self, name: str, experts: int, hidden: int) -> None:
        expect(name, self.weight, (experts, hidden), (torch.float32, torch.bfloat16))
        if not 1 <= self.top_k <= experts:
            raise ShapeError(f"{name}.top_k", f"expected 1 to {experts}, got {self.top_k}")
        if self.kind not in ROUTERS:
            raise UnknownNameError(f"{name}.kind", self.kind, ROUTERS)
        for field, vector in (("bias", self.bias), ("correction", self.correction), ("scales", self.scales)):
            if vector is not None:
                expect(f"{name}.{field}", vector, (experts,))
        if self.groups < 1 or experts % self.groups or not 1 <= self.groups_kept <= self.groups:
            found = f"{self.groups_kept} of {self.groups} groups"
            raise ShapeError(f"{name}.groups", f"expected groups that divide {experts} experts, got {found}")
        if self.group_best not in (1, 2):
            raise ShapeError(f"{name}.group_best", f"expected 1 or 2, got {self.group_best}")
        if self.top_k > experts // self.groups * self.groups_kept:
            raise ShapeError(f"{name}.top_k", f"expected at most the experts of {self.groups_kept} groups")

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and numbers of the chosen experts, float32 and int64 ``[T, top_k]``."""
        scores = functional.linear(x.float(), self.weight.float(), self.bias)
        if self.kind == "softmax":
            scores = scores.softmax(dim=-1)
        elif self.kind == "sigmoid":
            scores = scores.sigmoid()
        choice = scores if self.correction is None else scores + self.correction
        if self.groups > 1:
            grouped = choice.view(len(x), self.groups, -1)
            best = grouped.topk(min(self.group_best, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
            kept = torch.zeros_like(best).scatter_(1, best.topk(self.groups_kept, dim=-1).indices, 1).bool()
            choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        chosen = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.kind == "softmax_of_chosen":
            weights = weights.softmax(dim=-1)
        elif self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights * self.factor
        return weights if self.scales is None else weights * self.scales[chosen], chosen


@dataclass(frozen=True, eq=False)
class ExpertNorms:
    """Norms of experts beside an MLP that does not read what they read: all of x ``[T, hidden]``, or of results."""

    router: Norm
    input: Norm
    experts: Norm
    mlp: Norm

    def check(self, name: str, hidden: int) -> None:
        for field in ("router", "input", "experts", "mlp"):
            getattr(self, field).check(f"{name}.{field}", hidden)


@dataclass(frozen=True, eq=False)
class Experts:
    """A mixture of experts: each token uses `Router.top_k` of many MLPs."""

    router: Router
    gate_up: tuple[PackedExperts, ...]  #: one ``[2 * intermediate, hidden]`` per expert, gate first; or gate and up
    down: PackedExperts  #: ``[hidden, intermediate]`` per expert
    gate_up_bias: tuple[Tensor, ...] | None = None  #: for each of `gate_up` ``[experts, rows]``
    down_bias: Tensor | None = None  #: ``[experts, hidden]`` or None
    activation: Activation = SILU
    shared: Mlp | None = None  #: an MLP that all tokens use in addition, or None
    shared_gate: Tensor | None = None  #: ``[hidden]``: the sigmoid of its product with x multiplies `shared`
    norms: ExpertNorms | None = None  #: norms of their own, where `shared` reads another input, without `shared_gate`

    @property
    def intermediate(self) -> int:
        return self.down.shape[1]

    def check(self, name: str, hidden: int) -> None:
        experts = len(self.down)
        self.activation.check(name)
        self.router.check(f"{name}.router", experts, hidden)
        if self.down.shape != (hidden, self.intermediate):
            raise ShapeError(f"{name}.down", f"expected {hidden} rows, got {list(self.down.shape)}")
        shapes = [(len(part), *part.shape) for part in self.gate_up]
        rows = 2 * self.intermediate // max(len(shapes), 1)
        if len(shapes) not in (1, 2) or any(shape != (experts, rows, hidden) for shape in shapes):
            expected = f"one of {[experts, 2 * self.intermediate, hidden]}, or two of half the rows"
            raise ShapeError(f"{name}.gate_up", f"expected {expected}, got {shapes}")
        if self.gate_up_bias is not None:
            if len(self.gate_up_bias) != len(shapes):
                raise ShapeError(f"{name}.gate_up_bias", f"expected {len(shapes)}, got {len(self.gate_up_bias)}")
            for bias in self.gate_up_bias:
                expect(f"{name}.gate_up_bias", bias, (experts, rows), tuple(DTYPES))
        if self.down_bias is not None:
            expect(f"{name}.down_bias", self.down_bias, (experts, hidden), tuple(DTYPES))
        if self.shared is not None:
            self.shared.check(f"{name}.shared", hidden)
        if self.shared_gate is not None:
            expect(f"{name}.shared_gate", self.shared_gate, (hidden,))
        if self.norms is not None:
            self.norms.check(f"{name}.norms", hidden)
            if self.shared is None or self.shared_gate is not None:
                raise UnsupportedTensorError(
                    f"{name}.norms", "expected None without a shared MLP, or with a gate of it"
                )


@dataclass(frozen=True, eq=False)
class LayerInputs(LayerInputsOptions):
    """What layers read of a token besides the residual stream, as in Gemma 3n and 4."""

    table: Tensor  #: ``[vocab, layers * size]``, bfloat16, float16 or float32
    projection: PackedWeight  #: ``[layers * size, hidden]``
    norm: Norm  #: norm ``[size]`` of the projection for each layer

    @property
    def table_dtype(self) -> torch.dtype:
        """A field of the C structure, which is filled by names."""
        return self.table.dtype

    @property
    def size(self) -> int:
        """Numbers that one layer reads of a token."""
        return self.norm.weight.numel()

    def check(self, vocab: int, layers: int, hidden: int) -> None:
        self.norm.check("inputs.norm", self.size)
        expect("inputs.table", self.table, (vocab, layers * self.size), tuple(DTYPES))
        expect_weights("inputs.projection", (self.projection,), layers * self.size, hidden)


@dataclass(frozen=True, eq=False)
class LayerInput:
    """What a layer does with its input: ``x += norm(out(function(gate(x)) * input))``, after the MLP."""

    gate: PackedWeight  #: ``[size, hidden]``
    out: PackedWeight  #: ``[hidden, size]``
    norm: Norm  #: norm ``[hidden]``
    activation: Activation

    def check(self, name: str, hidden: int) -> None:
        self.activation.check(name)
        if not self.activation.gated:
            raise UnsupportedTensorError(f"{name}.activation", "expected a gated one")
        expect_weights(f"{name}.gate", (self.gate,), self.gate.shape[0], hidden)
        expect_weights(f"{name}.out", (self.out,), hidden, self.gate.shape[0])
        self.norm.check(f"{name}.norm", hidden)
