"""The kernels on a GPU: every format against float64, in eager mode, in CUDA graphs and under `torch.compile`."""

from __future__ import annotations

import copy

import pytest
import torch
from gpu_cases import GPU_KINDS, case
from kernel_cases import BARS, DTYPES, bits, product

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels.linear import linear, linear_fused
from minifloat.kernels.linear.triton import GpuWeight, pack, why_unavailable
from minifloat.numerics.tensor import QuantizedTensor

pytestmark = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())

ROWS = (1, 3, 16, 17, 64, 129, 700, 3000)
kinds = pytest.mark.parametrize("kind", GPU_KINDS)


def packed(kind: str, rows: int, cols: int) -> tuple[GpuWeight, torch.Tensor]:
    """A weight on the GPU, and its values there in float64."""
    weight, values = case(kind, rows, cols)
    factor = None if weight.global_scale is None else weight.global_scale.cuda()
    there = QuantizedTensor(
        weight.spec, weight.shape, weight.codes.cuda(), weight.scale.cuda(), factor, weight.global_divides
    )
    return pack(there), values.cuda()


def inputs(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(2)).to(dtype).cuda()


def assert_right(result: torch.Tensor, exact: torch.Tensor, rows: int) -> None:
    """Relative L2; where the weight is rounded in memory first, by that rounding too."""
    bar = {torch.float32: 1e-5}.get(result.dtype, BARS[result.dtype]) * (2 if rows > 64 else 1)
    assert result.isfinite().all()
    assert float((result.double() - exact).norm() / exact.norm()) < bar


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(384, 512), (1000, 4096), (200, 160)])
def test_gpu_products_are_those_in_float64(kind: str, dtype: torch.dtype, n: int, k: int) -> None:
    weight, values = packed(kind, n, k)
    bias = inputs(1, n, dtype)[0]
    for m in ROWS:
        x = inputs(m, k, dtype)
        poison = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")
        del poison  # the allocator gives the same memory to the result
        assert_right(linear(x, weight, bias, impl="triton"), product(x, values, bias), m)


@kinds
def test_gpu_products_have_the_same_bits_every_time(kind: str) -> None:
    weight, _ = packed(kind, 512, 4096)
    for m in (1, 17, 64, 200):
        x = inputs(m, 4096, torch.bfloat16)
        first = bits(linear(x, weight))
        assert all(torch.equal(bits(linear(x, weight)), first) for _ in range(20))


@kinds
def test_gpu_products_are_captured_in_a_graph_and_replayed(kind: str) -> None:
    weight, _ = packed(kind, 512, 4096)
    for m in (1, 16, 64, 3000):
        x = inputs(m, 4096, torch.bfloat16)
        expected = bits(linear(x, weight))
        held = torch.zeros_like(x)
        graph = torch.cuda.CUDAGraph()
        linear(held, weight)
        with torch.cuda.graph(graph):
            y = linear(held, weight)
            again = linear(held, weight)
        held.copy_(x)
        for _ in range(3):
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(bits(y), expected)
            assert torch.equal(bits(again), expected)


@kinds
def test_gpu_products_are_compiled(kind: str) -> None:
    weight, _ = packed(kind, 384, 512)
    x = inputs(3, 512, torch.bfloat16)
    compiled = torch.compile(lambda x: linear(x, weight) * 2, fullgraph=True)
    assert torch.equal(compiled(x), linear(x, weight) * 2)


@kinds
def test_gpu_weights_unpack_to_the_packed_codes_and_scales(kind: str) -> None:
    weight, values = packed(kind, 260, 416)
    assert weight.codes.is_cuda
    torch.testing.assert_close(weight.dequantize().double(), values, rtol=1e-6, atol=0)
    copied = copy.deepcopy(weight)
    x = inputs(5, 416, torch.bfloat16)
    assert torch.equal(linear(x, copied), linear(x, weight))


def test_gpu_weights_are_multiplied_on_several_streams() -> None:
    weight, _ = packed("mxfp4", 512, 4096)
    x = inputs(16, 4096, torch.bfloat16)
    expected = linear(x, weight)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(linear(x, weight))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_gpu_weights_with_one_input_are_multiplied_in_one_call() -> None:
    weights = [packed(kind, 128, 256)[0] for kind in ("fp8-channel", "mxfp4")]
    x = inputs(3, 256, torch.bfloat16)
    for one, weight in zip(linear_fused(x, weights), weights, strict=True):
        assert torch.equal(one, linear(x, weight))


def test_gpu_products_refuse_arguments_that_do_not_fit() -> None:
    weight, _ = packed("mxfp4", 128, 256)
    with pytest.raises(ShapeError, match="x: expected"):
        linear(inputs(3, 128, torch.bfloat16), weight)
    with pytest.raises(ShapeError, match="bias: expected"):
        linear(inputs(3, 256, torch.bfloat16), weight, inputs(1, 3, torch.bfloat16)[0])
    with pytest.raises(UnsupportedTensorError, match="where the weight is"):
        linear(torch.randn(3, 256), weight)
    with pytest.raises(UnsupportedTensorError, match="float64"):
        linear(torch.randn(3, 256, dtype=torch.float64, device="cuda"), weight)


def test_gpu_products_take_any_leading_shape_and_strides() -> None:
    weight, values = packed("fp8-channel", 128, 256)
    x = inputs(6, 256, torch.bfloat16)
    expected = linear(x, weight)
    assert torch.equal(linear(x.view(2, 3, 256), weight).view(6, 128), expected)
    assert torch.equal(linear(x.T.contiguous().T, weight), expected)
    assert linear(x[:0], weight).shape == (0, 128)
    assert_right(linear(x[0], weight), product(x[:1], values)[0], 1)
