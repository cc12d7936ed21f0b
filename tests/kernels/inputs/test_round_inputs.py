"""`round_inputs`: the choice of the implementation, refused arguments, and its use by `linear`."""

from __future__ import annotations

import functools

import pytest
import torch
from kernel_cases import bits

from minifloat.errors import KernelUnavailable, ShapeError, UnknownNameError, UnsupportedTensorError
from minifloat.kernels import inputs as module
from minifloat.kernels import native
from minifloat.kernels.inputs import round_inputs
from minifloat.kernels.linear import linear
from minifloat.kernels.pack import pack
from minifloat.numerics.formats import E2M1, E4M3
from minifloat.numerics.granularity import BLOCK_128, GROUP_128, TENSOR
from minifloat.numerics.scheme import SCHEMES, ActivationSpec
from minifloat.numerics.tensor import quantize_tensor

SPECS = {name: scheme.activation for name, scheme in SCHEMES.items() if scheme.activation}
SPECS |= {"tensor": ActivationSpec(E4M3, TENSOR, dynamic=True)}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
needs_library = pytest.mark.skipif(native.load() is None, reason=native.why_unavailable())
reference = functools.partial(round_inputs, impl="reference")


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def scale_for(spec: ActivationSpec) -> torch.Tensor | None:
    """The scale of static inputs, or the divisor of E4M3 scales."""
    return torch.tensor([64.0 if spec.has_global_scale else 0.01]) if spec.needs_calibration else None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The inputs that the native library was given."""
    seen: list[torch.Tensor] = []
    run = module._round_native

    def spy(x: torch.Tensor, spec: ActivationSpec, scale: torch.Tensor | None) -> torch.Tensor:
        seen.append(x)
        return run(x, spec, scale)

    monkeypatch.setattr(module, "_round_native", spy)
    return seen


@needs_library
@specs
@pytest.mark.parametrize("shape", [(300,), (0, 300), (2, 0, 300), (3, 0), (2, 3, 300), (1, 1), (2, 2, 2, 17)])
def test_any_leading_shape_is_kept(spec: ActivationSpec, shape: tuple[int, ...], calls: list[torch.Tensor]) -> None:
    x, scale = inputs(*shape).bfloat16(), scale_for(spec)
    result = round_inputs(x, spec, scale)
    assert len(calls) == 1
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    assert torch.equal(result, reference(x, spec, scale))


@needs_library
@specs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_kind_of_number_is_rounded_as_the_reference_does(spec: ActivationSpec, dtype: torch.dtype) -> None:
    x = torch.ldexp(inputs(64, 300), torch.arange(-160, 160, 5)[:, None]).to(dtype)  # K is no multiple of a group
    x[0, :40], x[1, 7], x[2, 40], x[3, 299] = -0.0, torch.nan, torch.inf, -torch.inf
    wanted = reference(x, spec, scale_for(spec))
    result = round_inputs(x, spec, scale_for(spec), impl="cpu")
    assert torch.equal(result.isnan(), wanted.isnan())
    assert torch.equal(bits(result)[~wanted.isnan()], bits(wanted)[~wanted.isnan()])


@needs_library
@specs
def test_any_strides_are_read(spec: ActivationSpec) -> None:
    wide = inputs(4, 6, 400)
    for x in (wide.transpose(0, 2), wide[:, ::2, 3:300], wide[..., ::3], wide[:1, :1].expand(4, 5, 400), wide.mT[2]):
        result = round_inputs(x, spec, scale_for(spec), impl="cpu")
        assert torch.equal(result, reference(x, spec, scale_for(spec)))


@needs_library
@specs
def test_one_call_of_several_threads_is_the_reference(spec: ActivationSpec) -> None:
    x = inputs(512, 1030).bfloat16()
    result = round_inputs(x, spec, scale_for(spec), impl="cpu")
    assert torch.equal(bits(result), bits(reference(x, spec, scale_for(spec))))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_scale_of_another_dtype_is_taken_as_float32(dtype: torch.dtype) -> None:
    x, scale = inputs(3, 40), torch.tensor(1 / 300, dtype=dtype)
    assert torch.equal(round_inputs(x, SPECS["fp8-static"], scale), round_inputs(x, SPECS["fp8-static"], scale.float()))


def test_plain_torch_computes_if_a_gradient_is_required(calls: list[torch.Tensor]) -> None:
    spec, x, scale = SPECS["fp8-static"], inputs(3, 40), torch.tensor(0.01, requires_grad=True)
    result = round_inputs(x, spec, scale)
    result.sum().backward()
    assert scale.grad is not None
    assert round_inputs(inputs(3, 40).requires_grad_(), SPECS["fp8-dynamic"]).requires_grad
    assert not calls
    with pytest.raises(KernelUnavailable, match="no gradient"):
        round_inputs(x, spec, scale, impl="cpu")


@needs_library
def test_without_grad_mode_a_parameter_of_scales_does_not_matter(calls: list[torch.Tensor]) -> None:
    with torch.no_grad():
        round_inputs(inputs(3, 40), SPECS["fp8-static"], torch.tensor(0.01, requires_grad=True))
    assert len(calls) == 1


@specs
@pytest.mark.filterwarnings("ignore:Dynamo detected a call")  # of the cache of a table
def test_a_compiler_sees_plain_torch(spec: ActivationSpec, calls: list[torch.Tensor]) -> None:
    x, scale = inputs(3, 300), scale_for(spec)
    torch.compiler.reset()  # a format that was compiled before would make the numbers of this one symbolic
    compiled = torch.compile(lambda x: round_inputs(x, spec, scale), backend="eager")
    assert torch.equal(compiled(x), reference(x, spec, scale))
    assert not calls


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(2, 128, device="meta"),
        torch.ones(2, 128, dtype=torch.float8_e5m2),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["meta", "float8", "parameter"],
)
def test_the_named_implementation_says_why_it_cannot_run(x: torch.Tensor) -> None:
    with pytest.raises(KernelUnavailable, match=r"round_inputs\(impl='cpu'\) cannot run: it "):
        round_inputs(x, SPECS["fp8-block"], impl="cpu")


def test_other_dtypes_and_devices_go_to_plain_torch(calls: list[torch.Tensor]) -> None:
    x = inputs(2, 130)
    assert torch.equal(round_inputs(x.double(), SPECS["fp8-block"]), reference(x, SPECS["fp8-block"], None))
    assert not calls


def test_without_the_library_the_named_implementation_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "why_unavailable", lambda: "not built")
    x = inputs(2, 130)
    assert torch.equal(round_inputs(x, SPECS["fp8-block"]), reference(x, SPECS["fp8-block"], None))
    with pytest.raises(KernelUnavailable, match="not built"):
        round_inputs(x, SPECS["fp8-block"], impl="cpu")


@pytest.mark.parametrize("impl", ["auto", "reference", "cpu"])
def test_unsupported_input_formats_are_refused_by_every_implementation(impl: str) -> None:
    with pytest.raises(UnsupportedTensorError, match="not simulated"):
        round_inputs(inputs(2, 128), ActivationSpec(E2M1, GROUP_128, dynamic=True), impl=impl)
    with pytest.raises(UnsupportedTensorError, match="not simulated"):
        round_inputs(inputs(2, 128), ActivationSpec(E4M3, BLOCK_128, dynamic=True), impl=impl)
    with pytest.raises(ValueError, match="needs a scale"):
        round_inputs(inputs(2, 128), SPECS["fp8-static"], impl=impl)
    with pytest.raises(ValueError, match="takes no scale"):
        round_inputs(inputs(2, 128), SPECS["fp8-dynamic"], torch.tensor(1.0), impl=impl)
    with pytest.raises(ShapeError, match="scalar"):
        round_inputs(torch.tensor(1.0), SPECS["fp8-dynamic"], impl=impl)


def test_an_implementation_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="valid: auto, reference, cpu"):
        round_inputs(inputs(2, 128), SPECS["fp8-dynamic"], impl="cutlass")


@needs_library
@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-dynamic", "fp8-static", "mxfp8-w8a8", "nvfp4-w4a4"])
def test_a_packed_weight_is_multiplied_with_inputs_rounded_here(scheme: str, calls: list[torch.Tensor]) -> None:
    weight, spec = pack(quantize_tensor(inputs(64, 200), SCHEMES[scheme].weight)), SPECS[scheme]
    x, scale = inputs(5, 200), scale_for(spec)
    result = linear(x, weight, activation=spec, input_scale=scale)
    assert [call.shape for call in calls] == [x.shape]
    assert torch.equal(result, linear(reference(x, spec, scale), weight))
