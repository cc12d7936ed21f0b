"""The kernels as torch ops under `torch.compile`, `torch.export` and autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels import native
from minifloat.kernels.linear import FusedWeights, linear, linear_fused
from minifloat.kernels.pack import PackedWeight, pack
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import quantize_tensor

pytestmark = pytest.mark.skipif(native.load() is None, reason=native.why_unavailable())

COLS = 96


def packed(rows: int, scheme: str = "fp8") -> PackedWeight:
    weight = torch.randn(rows, COLS, generator=torch.Generator().manual_seed(rows))
    return pack(quantize_tensor(weight, SCHEMES[scheme].weight))


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)


class Layer(nn.Module):
    """A packed weight as a buffer, and two that are multiplied together."""

    data: Tensor

    def __init__(self) -> None:
        super().__init__()
        weight = packed(33, "mxfp4")
        self.spec, self.shape = weight.spec, weight.shape
        self.register_buffer("data", weight.data)
        self.register_buffer("bias", inputs(33))
        self.pair = FusedWeights([packed(COLS), packed(COLS)])

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear_fused(x, self.pair)
        return linear(gate * up, PackedWeight(self.data, self.spec, self.shape), self.bias)


def linear_arguments() -> tuple[object, ...]:
    return inputs(2, 3, COLS), [packed(33).data, packed(40).data], [inputs(33), None], [33, 40]


def moe_arguments() -> tuple[object, ...]:
    offsets, x_rows = torch.tensor([0, 3, 3, 5]), torch.tensor([1, 0, 1, 2, 0])
    experts = [packed(33).data, packed(33).data.clone(), packed(33).data.clone()]
    return inputs(3, COLS), experts, offsets, x_rows, inputs(3, 33), 33


@pytest.mark.parametrize("name", ["linear", "moe_linear"])
def test_the_ops_pass_the_checks_of_torch(name: str) -> None:
    arguments = linear_arguments() if name == "linear" else moe_arguments()
    torch.library.opcheck(getattr(torch.ops.minifloat, name).default, arguments)


def test_a_module_compiles_into_one_graph_before_it_has_ever_run() -> None:
    layer, x = Layer(), inputs(5, COLS)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))


def test_a_module_is_exported_with_any_number_of_tokens() -> None:
    layer = Layer()
    tokens = torch.export.Dim("tokens", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(layer, (inputs(5, COLS),), dynamic_shapes=({0: tokens},))
        for count in (5, 9):
            x = inputs(count, COLS)
            assert torch.equal(program.module()(x), layer(x))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert sum("minifloat.linear" in target for target in targets) == 2


def test_the_op_gives_the_bits_of_the_eager_call() -> None:
    x, weights, bias = inputs(7, COLS), [packed(33), packed(40)], inputs(33)
    result = torch.ops.minifloat.linear(x, [weight.data for weight in weights], [bias, None], [33, 40])
    assert torch.equal(result, torch.cat(linear_fused(x, weights, [bias, None]), dim=-1))


@pytest.mark.parametrize("which", ["x", "bias"])
def test_a_gradient_is_refused_in_backward_and_not_before(which: str) -> None:
    x, bias = inputs(7, COLS), inputs(33)
    (x if which == "x" else bias).requires_grad_()
    result = linear(x, packed(33), bias)
    assert torch.equal(result, linear(x.detach(), packed(33), bias.detach()))
    with pytest.raises(RuntimeError, match="no autograd formula"):
        result.sum().backward()
    with torch.no_grad():
        assert not linear(x, packed(33), bias).requires_grad


def test_the_op_refuses_bytes_that_are_no_packed_weight() -> None:
    x, data = inputs(2, COLS), packed(33).data
    for wrong in (torch.zeros(4096, dtype=torch.uint8), data[:-1], data[1:].clone(), data[:8]):
        with pytest.raises((UnsupportedTensorError, ShapeError)):
            torch.ops.minifloat.linear(x, [wrong], [], [33])
    with pytest.raises(ShapeError, match="expected a packed weight 34x96"):
        torch.ops.minifloat.linear(x, [data], [], [34])
    with pytest.raises(UnsupportedTensorError, match="several kinds"):
        torch.ops.minifloat.linear(x, [data, packed(33, "mxfp4").data], [], [33, 33])
