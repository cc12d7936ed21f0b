"""W8A8 by `scaled_mm`: results on a CPU, arguments for blocks, the choice of `impl`; on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch
from triton_cases import needs_cuda

from minifloat.errors import KernelUnavailable
from minifloat.kernels.inputs import quantize_inputs
from minifloat.kernels.linear import linear, scaled_mm
from minifloat.kernels.linear.scaled_mm import Recipe, recipe_of
from minifloat.numerics.activation import dequantize_activation, quantize_activation
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, GROUP_32, GROUP_128, TENSOR, TOKEN
from minifloat.numerics.scheme import SCHEMES, ActivationSpec, WeightSpec
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor

STATIC = ActivationSpec(E4M3, TENSOR, dynamic=False)
TOKENS = ActivationSpec(E4M3, TOKEN, dynamic=True)
GROUPS = ActivationSpec(E4M3, GROUP_128, dynamic=True)
#: Inputs and weights of the recipes that a CPU has.
PAIRS = {
    "fp8-static": (STATIC, TENSOR),
    "fp8-dynamic": (TOKENS, CHANNEL),
    "static inputs, weights per channel": (STATIC, CHANNEL),
    "tokens, weights per tensor": (TOKENS, TENSOR),
    "one dynamic scale": (ActivationSpec(E4M3, TENSOR, dynamic=True), TENSOR),
}
pairs = pytest.mark.parametrize(("activation", "granularity"), PAIRS.values(), ids=PAIRS)
#: What a sum of K products in float32 may be off, relative to the lengths of both rows; and half a step of dtypes.
SUMS = 1e-6
HALF_STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(
    activation: ActivationSpec, granularity: object, shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, QuantizedTensor, torch.Tensor | None]:
    m, n, k = shape
    weight = quantize_tensor(random(n, k, seed=1) * 0.02, WeightSpec(E4M3, granularity))  # type: ignore[arg-type]
    return random(m, k).to(dtype), weight, None if activation.dynamic else torch.tensor(0.005)


def exact(
    x: torch.Tensor, weight: QuantizedTensor, activation: ActivationSpec, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of what the codes stand for in float64, and the measure of rounding in its sums."""
    values = dequantize_activation(*quantize_activation(x, activation, scale), activation).double()
    weights = weight.dequantize().double()
    return values @ weights.T, values.norm(dim=-1)[..., None] * weights.norm(dim=-1)


@pairs
@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
@pytest.mark.parametrize("shape", [(1, 16, 32), (17, 48, 160), (5, 33, 47)])
def test_scaled_mm_matches_the_reference(
    activation: ActivationSpec, granularity: object, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, weight, scale = case(activation, granularity, shape, dtype)
    bias = random(shape[1], seed=2)
    for b in (None, bias, bias.to(dtype)):
        actual = linear(x, weight, b, activation=activation, input_scale=scale, impl="scaled_mm")
        expected, lengths = exact(x, weight, activation, scale)
        expected = expected if b is None else expected + b.double()
        assert actual.dtype == dtype
        assert ((actual.double() - expected).abs() <= HALF_STEP[dtype] * 1.01 * expected.abs() + SUMS * lengths).all()
        reference = linear(x, weight, b, activation=activation, input_scale=scale, impl="reference")
        excess = (actual.double() - reference.double()).abs() - 2 * SUMS * lengths
        assert (excess <= 2 * HALF_STEP[dtype] * 1.01 * expected.abs()).all()


def test_any_leading_shape_is_kept() -> None:
    _, weight, _ = case(TOKENS, CHANNEL, (1, 16, 32), torch.float32)
    for shape in ((32,), (2, 3, 32), (0, 32), (2, 0, 32)):
        assert linear(random(*shape), weight, activation=TOKENS, impl="scaled_mm").shape == (*shape[:-1], 16)


def test_block_scales_have_the_strides_that_cublas_requires() -> None:
    """Column after column; those of 128x128 a multiple of four long, and rows of x filled up to aligned vectors."""
    for n, k in ((256, 512), (384, 1280), (16, 128)):
        weight = quantize_tensor(random(n, k), WeightSpec(E4M3, BLOCK_128))
        codes, scale = quantize_inputs(random(17, k), GROUPS, row_multiple=scaled_mm.ALIGNMENT)
        inputs, kind = scaled_mm.input_scales(Recipe.BLOCK, scale, codes.shape[0])
        assert (kind, inputs.shape) == (torch.nn.functional.ScalingType.BlockWise1x128, (32, k // 128))
        assert inputs.stride(0) == 1
        assert inputs.stride(1) == 32 or inputs.shape[1] == 1
        grid, kind = scaled_mm.weight_scales(Recipe.BLOCK, weight)
        length = -(-(k // 128) // 4) * 4
        assert (kind, grid.shape) == (torch.nn.functional.ScalingType.BlockWise128x128, (length, -(-n // 128)))
        assert grid.stride(0) == 1
        assert grid.stride(1) == length or grid.shape[1] == 1
        assert torch.equal(grid[: k // 128].t(), weight.scale)
        assert not grid[k // 128 :].any()


def test_the_recipe_follows_from_the_granularities_alone() -> None:
    assert recipe_of(TENSOR, TENSOR) is Recipe.TENSOR
    assert {recipe_of(*pair) for pair in ((TENSOR, CHANNEL), (TOKEN, TENSOR), (TOKEN, CHANNEL))} == {Recipe.ROW}
    assert recipe_of(GROUP_128, BLOCK_128) is Recipe.BLOCK
    for inputs, weight in ((GROUP_128, CHANNEL), (TOKEN, BLOCK_128), (GROUP_32, GROUP_32), (GROUP_128, GROUP_128)):
        assert recipe_of(inputs, weight) is None


@pytest.mark.parametrize("rows", [1, 255, 4096])
def test_on_a_cpu_scaled_mm_runs_only_if_impl_names_it(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = case(TOKENS, CHANNEL, (rows, 16, 32), torch.bfloat16)
    expected = linear(x, weight, activation=TOKENS, impl="reference")
    monkeypatch.setattr(scaled_mm, "quantized_linear", None)
    assert torch.equal(linear(x, weight, activation=TOKENS), expected)


def test_scaled_mm_gives_the_reason_why_it_cannot_run() -> None:
    x, weight, _ = case(GROUPS, BLOCK_128, (2, 128, 128), torch.float32)
    with pytest.raises(KernelUnavailable, match=r"impl='scaled_mm'\) cannot run: scaled_mm multiplies blocks on CUDA"):
        linear(x, weight, activation=GROUPS, impl="scaled_mm")
    with pytest.raises(KernelUnavailable, match="give an activation"):
        linear(x, weight, impl="scaled_mm")
    with pytest.raises(KernelUnavailable, match="no recipe for inputs per token, weights per block 128x128"):
        linear(x, weight, activation=TOKENS, impl="scaled_mm")
    x, weight, _ = case(TOKENS, CHANNEL, (2, 128, 128), torch.float64)
    with pytest.raises(KernelUnavailable, match=r"got torch\.float64"):
        linear(x, weight, activation=TOKENS, impl="scaled_mm")


@pytest.mark.parametrize(
    ("capability", "scheme", "shape", "runs"),
    [
        ((8, 0), "fp8-dynamic", (256, 256), False),
        ((8, 9), "fp8-dynamic", (256, 256), True),
        ((9, 0), "fp8-static", (256, 256), True),
        ((9, 0), "fp8-dynamic", (256, 40), False),
        ((9, 0), "fp8-dynamic", (40, 256), False),
        ((8, 9), "fp8-block", (256, 256), False),
        ((9, 0), "fp8-block", (256, 256), True),
        ((9, 0), "fp8-block", (256, 272), False),
        ((10, 0), "fp8-block", (256, 256), False),
    ],
)
def test_scaled_mm_supports_these_gpus_and_weights(
    capability: tuple[int, int], scheme: str, shape: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = quantize_tensor(torch.zeros(shape), SCHEMES[scheme].weight)
    activation = SCHEMES[scheme].activation
    assert activation is not None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    on_gpu = _OnGpu(weight.spec, weight.shape, weight.codes, weight.scale)
    assert (not scaled_mm.why_not(on_gpu, activation)) == runs


class _OnGpu(QuantizedTensor):
    """A weight whose codes say that they are on a GPU."""

    class _Codes:
        device = torch.device("cuda", 0)

    def __getattribute__(self, name: str) -> object:
        return self._Codes if name == "codes" else super().__getattribute__(name)

    def __post_init__(self) -> None:
        pass


@needs_cuda
@pytest.mark.parametrize("scheme", ["fp8-static", "fp8-dynamic", "fp8-block"])
@pytest.mark.parametrize("m", [1, 3, 16, 17, 64, 129])
@pytest.mark.parametrize("shape", [(256, 512), (384, 1280), (4096, 4096)])
def test_on_a_gpu_it_is_near_the_exact_product(scheme: str, m: int, shape: tuple[int, int]) -> None:
    activation, spec = SCHEMES[scheme].activation, SCHEMES[scheme].weight
    assert activation is not None
    x, stored, scale = case(activation, spec.granularity, (m, *shape), torch.bfloat16)
    weight = QuantizedTensor(spec, stored.shape, stored.codes.cuda(), stored.scale.cuda())
    if scaled_mm.why_not(weight, activation):
        pytest.skip(scaled_mm.why_not(weight, activation))
    given = None if scale is None else scale.cuda()
    expected, lengths = exact(x, stored, activation, scale)
    bias = random(shape[0], seed=2)
    for b in (None, bias, bias.bfloat16()):
        on_gpu = None if b is None else b.cuda()
        actual = linear(x.cuda(), weight, on_gpu, activation=activation, input_scale=given, impl="scaled_mm").cpu()
        wanted = expected if b is None else expected + b.double()
        # Hopper's tensor cores keep 14 bits while they add 32 products up; see DeepSeek-V3, section 3.3.2.
        allowed = HALF_STEP[torch.bfloat16] * 1.01 * wanted.abs() + 2.0**-12 * lengths
        assert ((actual.double() - wanted).abs() <= allowed).all()
