"""`Mlp`, and the functions that its gate passes through."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from minifloat.errors import UnknownNameError
from minifloat.kernels.decoder.expect import expect_biases, expect_weights
from minifloat.kernels.pack import FusedWeights, PackedWeight

#: Names of activation functions, in the order of ``enum minifloat_activation_kind``.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")


@dataclass(frozen=True)
class Activation:
    """What an MLP does between its products."""

    name: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float = float("inf")

    @property
    def inputs(self) -> int:
        """Projections whose results it takes."""
        return 2 if self.gated else 1

    def check(self, name: str) -> None:
        """Raise UnknownNameError if there is no such function."""
        if self.name not in ACTIVATIONS:
            raise UnknownNameError(f"{name}.activation", self.name, ACTIVATIONS)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it to float32 rows ``[.., 2 * n]`` of gate and up, or to rows ``[.., n]``."""
        if not self.gated:
            return self._function(x)
        gate, up = x.chunk(2, dim=-1)
        if self.name != "clamped_swiglu":
            return self._function(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    def _function(self, x: Tensor) -> Tensor:
        if self.name in ("gelu", "gelu_tanh"):
            return functional.gelu(x, approximate="tanh" if self.name == "gelu_tanh" else "none")
        if self.name in ("relu", "relu2"):
            return functional.relu(x) ** (2 if self.name == "relu2" else 1)
        return functional.silu(x)


#: Of most models.
SILU = Activation()


@dataclass(frozen=True, eq=False)
class Mlp:
    """``down(function(gate(x)) * up(x))``, or ``down(function(up(x)))``.

    Attributes:
        gate_up: The rows of gate and up, ``[intermediate, hidden]`` each, in one or two weights; without a gate those
            of up.
        down: ``[hidden, intermediate]``.
        gate_up_bias: A bias or None for each weight of `gate_up`, of one dtype; or None.
        down_bias: ``[hidden]`` or None.
    """

    gate_up: FusedWeights
    down: PackedWeight
    gate_up_bias: tuple[Tensor | None, ...] | None = None
    down_bias: Tensor | None = None
    activation: Activation = SILU

    @property
    def intermediate(self) -> int:
        """Columns of `down`."""
        return self.down.shape[1]

    def check(self, name: str, hidden: int) -> None:
        """Validate sizes and dtypes; `name` is the prefix of field names in errors."""
        self.activation.check(name)
        expect_weights(f"{name}.down", (self.down,), hidden, self.intermediate)
        expect_weights(f"{name}.gate_up", self.gate_up, self.activation.inputs * self.intermediate, hidden)
        expect_biases(f"{name}.gate_up_bias", self.gate_up_bias, self.gate_up)
        expect_biases(f"{name}.down_bias", (self.down_bias,), (self.down,))
