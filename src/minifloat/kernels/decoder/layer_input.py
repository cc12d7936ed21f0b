"""`LayerInputs`: what layers read of a token besides the residual stream, as in Gemma 3n and 4."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minifloat.errors import UnsupportedTensorError
from minifloat.kernels.decoder.expect import expect, expect_weights
from minifloat.kernels.decoder.mlp import Activation
from minifloat.kernels.decoder.norm import Norm
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.pack import PackedWeight


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """``(norm(projection(embedding of the token)) + row of the token in table * table_factor) * factor``.

    Attributes:
        table: ``[vocab, layers * size]``, bfloat16, float16 or float32.
        projection: ``[layers * size, hidden]``.
        norm: Norm ``[size]`` of the projection for each layer.
    """

    table: Tensor
    projection: PackedWeight
    norm: Norm
    table_factor: float = 1.0
    factor: float = 1.0

    @property
    def size(self) -> int:
        """Numbers that one layer reads of a token."""
        return self.norm.weight.numel()

    def check(self, vocab: int, layers: int, hidden: int) -> None:
        """Validate sizes and dtypes."""
        self.norm.check("inputs.norm", self.size)
        expect("inputs.table", self.table, (vocab, layers * self.size), tuple(DTYPES))
        expect_weights("inputs.projection", (self.projection,), layers * self.size, hidden)


@dataclass(frozen=True, eq=False)
class LayerInput:
    """What a layer does with its input: ``x += norm(out(function(gate(x)) * input))``, after the MLP.

    Attributes:
        gate: ``[size, hidden]``.
        out: ``[hidden, size]``.
        norm: Norm ``[hidden]``.
    """

    gate: PackedWeight
    out: PackedWeight
    norm: Norm
    activation: Activation

    def check(self, name: str, hidden: int) -> None:
        """Validate sizes and dtypes; `name` is the prefix of field names in errors."""
        self.activation.check(name)
        if not self.activation.gated:
            raise UnsupportedTensorError(f"{name}.activation", "expected a gated one")
        expect_weights(f"{name}.gate", (self.gate,), self.gate.shape[0], hidden)
        expect_weights(f"{name}.out", (self.out,), hidden, self.gate.shape[0])
        self.norm.check(f"{name}.norm", hidden)
