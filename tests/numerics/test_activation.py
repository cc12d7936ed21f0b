"""Tests of quantized inputs against compressed-tensors and, where it has no such format, torch's FP8 cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minifloat.errors import UnsupportedTensorError
from minifloat.numerics.activation import (
    can_quantize,
    dequantize_activation,
    quantize_activation,
)
from minifloat.numerics.formats import E2M1, E4M3, E5M2, E8M0
from minifloat.numerics.granularity import BLOCK_128, GROUP_16, GROUP_32, GROUP_128, TENSOR, TOKEN, block_granularity
from minifloat.numerics.scheme import SCHEMES, ActivationSpec, WeightSpec

PER_TOKEN = ActivationSpec(E4M3, TOKEN, dynamic=True)
PER_GROUP = ActivationSpec(E4M3, GROUP_128, dynamic=True)
PER_GROUP_OF_32 = ActivationSpec(E4M3, GROUP_32, dynamic=True)
DYNAMIC_TENSOR = ActivationSpec(E4M3, TENSOR, dynamic=True)
STATIC = ActivationSpec(E4M3, TENSOR, dynamic=False)
WITH_FLOAT_SCALES = [PER_TOKEN, PER_GROUP, PER_GROUP_OF_32, DYNAMIC_TENSOR, STATIC]
MXFP8 = ActivationSpec(E4M3, GROUP_32, dynamic=True, scale=E8M0)
MXFP4 = ActivationSpec(E2M1, GROUP_32, dynamic=True, scale=E8M0)
NVFP4 = ActivationSpec(E2M1, GROUP_16, dynamic=True, scale=E4M3)
SIMULATED = [*WITH_FLOAT_SCALES, MXFP8, MXFP4, NVFP4]

CT_ARGUMENTS: dict[ActivationSpec, dict[str, Any]] = {
    PER_TOKEN: {"strategy": "token", "dynamic": True},
    PER_GROUP: {"strategy": "group", "group_size": 128, "dynamic": True},
    PER_GROUP_OF_32: {"strategy": "group", "group_size": 32, "dynamic": True},
    DYNAMIC_TENSOR: {"strategy": "tensor", "dynamic": True},
    STATIC: {"strategy": "tensor", "dynamic": False},
}
#: Presets of compressed-tensors whose inputs have these formats.
CT_PRESETS = {MXFP8: ("MXFP8", "MXFP6A8"), MXFP4: ("MXFP4",), NVFP4: ("NVFP4",)}


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return Gaussian tokens; the first ones are zero, tiny, huge, powers of two, and one with an outlier."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(4))
    tokens = x.view(-1, shape[-1])
    tokens[0] = 0.0
    tokens[1] *= 1e-6
    tokens[2] *= 1e4
    tokens[3] = 2.0 ** torch.arange(shape[-1]).remainder(9).neg()
    tokens[4, shape[-1] // 2] = -300.0
    return x.to(dtype)


def fake_quantized(x: torch.Tensor, spec: ActivationSpec, scale: torch.Tensor | None = None) -> torch.Tensor:
    codes, grid = quantize_activation(x, spec, scale)
    return dequantize_activation(codes, grid, spec)


def static_scale(spec: ActivationSpec, value: float = 0.0125) -> torch.Tensor | None:
    return torch.tensor(value) if spec.needs_calibration else None


# ------------------------------------------------------------------------------- against other implementations


@pytest.mark.parametrize("spec", WITH_FLOAT_SCALES, ids=str)
@pytest.mark.parametrize("scale", [0.0125, 1.0, 3e-7])
def test_codes_and_scales_equal_those_of_compressed_tensors_bit_for_bit(spec: ActivationSpec, scale: float) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    x = inputs(2, 8, 256)
    arguments = quantization.QuantizationArgs(num_bits=8, type="float", symmetric=True, **CT_ARGUMENTS[spec])
    input_scale = static_scale(spec, scale)
    if input_scale is None:
        reference_scale, zero_point = utils.compute_dynamic_scales_and_zp(x, arguments, torch.nn.Module())
    else:
        reference_scale, zero_point = input_scale.reshape(1), None
    expected = lifecycle.fake_quantize(x, reference_scale, zero_point, arguments)
    codes, grid = quantize_activation(x, spec, input_scale)
    assert torch.equal(dequantize_activation(codes, grid, spec), expected)
    if spec.dynamic:
        assert torch.equal(grid.flatten(), reference_scale.flatten())


def every_mantissa(group: int) -> torch.Tensor:
    """Return float32 groups whose amax takes 64 mantissas in each of many binades, with smaller values beside it."""
    mantissas = 1 + torch.arange(64) / 64
    tops = (mantissas[None, :] * 2.0 ** torch.arange(-140, 127, dtype=torch.float64)[:, None]).flatten()
    fractions = torch.rand(tops.numel(), group - 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    signs = torch.where(fractions > 0.5, -1, 1)
    return torch.cat([tops[:, None], tops[:, None] * fractions * signs], 1).float()


@pytest.mark.parametrize("divisor", [1.0, 2688 / 3.7, 3e4, 2e-5])
@pytest.mark.parametrize(
    ("spec", "preset"), [(spec, name) for spec, names in CT_PRESETS.items() for name in names], ids=str
)
def test_mx_and_nvfp4_inputs_equal_those_of_a_module_of_compressed_tensors_bit_for_bit(
    spec: ActivationSpec, preset: str, divisor: float
) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    arguments = quantization.preset_name_to_scheme(preset, ["Linear"]).input_activations
    module = torch.nn.Module()
    module.quantization_status = quantization.QuantizationStatus.FROZEN
    scale = static_scale(spec, divisor)
    if scale is not None:
        module.input_global_scale = scale.reshape(1)
    group = spec.granularity.cols
    assert group == arguments.group_size
    for x in (inputs(2, 8, 256), inputs(9, 64) * 40, every_mantissa(group), every_mantissa(group)[::7] * 0 + 1e-3):
        expected = lifecycle.forward_quantize(module, x, "input", arguments)
        assert torch.equal(fake_quantized(x, spec, scale), expected)


@pytest.mark.parametrize("spec", [MXFP8, MXFP4], ids=str)
def test_mx_inputs_in_bf16_equal_those_of_compressed_tensors_bit_for_bit(spec: ActivationSpec) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    arguments = quantization.preset_name_to_scheme(CT_PRESETS[spec][0], ["Linear"]).input_activations
    module = torch.nn.Module()
    module.quantization_status = quantization.QuantizationStatus.FROZEN
    x = inputs(9, 256, dtype=torch.bfloat16)
    expected = lifecycle.forward_quantize(module, x, "input", arguments)
    assert torch.equal(fake_quantized(x, spec), expected.float())


# ---------------------------------------------------------------------------------------------- properties


def test_a_token_is_quantized_independently_of_the_others() -> None:
    x = inputs(9, 200)
    for spec in (PER_TOKEN, PER_GROUP):
        alone = torch.cat([fake_quantized(token[None], spec) for token in x])
        assert torch.equal(fake_quantized(x, spec), alone)


def test_a_static_scale_clamps_values_beyond_its_range() -> None:
    x = torch.tensor([[1.0, 448.0, 500.0, -1e30, torch.inf]])
    expected = torch.tensor([[1.0, 448.0, 448.0, -448.0, 448.0]])
    assert torch.equal(fake_quantized(x, STATIC, torch.tensor(1.0)), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_only_a_token_with_a_non_finite_value_becomes_nan(bad: float) -> None:
    x = inputs(9, 200)
    x[6, 150] = bad
    values = fake_quantized(x, PER_TOKEN)
    assert values[6].isnan().all()
    assert values[[*range(6), 7, 8]].isfinite().all()
    grouped = fake_quantized(x, PER_GROUP)
    assert grouped[6, 128:].isnan().all()
    assert grouped[6, :128].isfinite().all()


@pytest.mark.parametrize("spec", [MXFP8, MXFP4, NVFP4], ids=str)
def test_only_a_group_with_nan_becomes_nan(spec: ActivationSpec) -> None:
    x = inputs(9, 200)
    x[6, 193] = torch.nan
    values = fake_quantized(x, spec, static_scale(spec, 1.0))
    assert values[6, 192:].isnan().all()
    assert values[6, :192].isfinite().all()
    assert values[[*range(6), 7, 8]].isfinite().all()


@pytest.mark.parametrize("spec", [MXFP8, MXFP4], ids=str)
def test_infinity_makes_a_group_of_mx_nan(spec: ActivationSpec) -> None:
    x = inputs(9, 200)
    x[6, 193] = -torch.inf
    assert fake_quantized(x, spec)[6, 192:].isnan().all()


def test_nvfp4_clamps_what_lies_beyond_its_divisor() -> None:
    x = torch.full((1, 16), 2.0)
    x[0, :2] = torch.tensor([100.0, -torch.inf])
    divisor = torch.tensor(448 * 6 / 10.0)  # calibration saw 10 at most
    values = fake_quantized(x, NVFP4, divisor)[0, :3]
    torch.testing.assert_close(values, torch.tensor([10.0, -10.0, 448 / 268.8]), rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("spec", [MXFP8, MXFP4, NVFP4], ids=str)
def test_a_group_of_zeros_stays_zero(spec: ActivationSpec) -> None:
    codes, grid = quantize_activation(torch.zeros(2, 200), spec, static_scale(spec, 1.0))
    assert not codes.any()
    assert grid.isfinite().all()
    assert (grid > 0).all()


def test_a_token_of_zeros_stays_zero() -> None:
    codes, grid = quantize_activation(torch.zeros(2, 200), PER_TOKEN)
    assert not codes.any()
    assert grid.tolist() == [[2.0**-23]] * 2


@pytest.mark.parametrize("spec", SIMULATED, ids=str)
@pytest.mark.parametrize("shape", [(200,), (1, 200), (0, 200), (2, 3, 4, 200), (2, 0, 200), (3, 0)])
def test_the_codes_have_the_shape_of_the_input(spec: ActivationSpec, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    codes, grid = quantize_activation(x, spec, static_scale(spec))
    assert codes.shape == shape
    tokens = x.reshape(-1, shape[-1]).shape[0] if x.numel() else int(torch.tensor(shape[:-1]).prod())
    assert tuple(grid.shape) == spec.granularity.scale_shape((tokens, shape[-1]))
    assert dequantize_activation(codes, grid, spec).shape == shape


# ------------------------------------------------------------------------------------------- unsupported inputs


@pytest.mark.parametrize(
    "spec",
    [
        ActivationSpec(E2M1, GROUP_16, dynamic=True),
        ActivationSpec(E2M1, GROUP_32, dynamic=True, scale=E4M3),
        ActivationSpec(E2M1, GROUP_16, dynamic=True, scale=E8M0),
        ActivationSpec(E4M3, GROUP_32, dynamic=False, scale=E8M0),
        ActivationSpec(E5M2, TOKEN, dynamic=True),
        ActivationSpec(E4M3, TOKEN, dynamic=False),
        ActivationSpec(E4M3, BLOCK_128, dynamic=True),
    ],
    ids=str,
)
def test_unsupported_specs_are_refused_with_the_cure(spec: ActivationSpec) -> None:
    with pytest.raises(UnsupportedTensorError, match="run this weight-only"):
        quantize_activation(inputs(9, 256), spec, static_scale(spec))
    assert not can_quantize(spec, SCHEMES["fp8"].weight)


def test_a_scale_is_required_for_static_specs_and_refused_for_dynamic_ones() -> None:
    with pytest.raises(ValueError, match="needs a scale"):
        quantize_activation(inputs(9, 256), STATIC)
    with pytest.raises(ValueError, match="needs a scale"):
        quantize_activation(inputs(9, 256), NVFP4)
    with pytest.raises(ValueError, match="takes no scale"):
        quantize_activation(inputs(9, 256), PER_TOKEN, torch.tensor(1.0))


def test_every_scheme_with_quantized_inputs_is_supported() -> None:
    declaring = [scheme for scheme in SCHEMES.values() if scheme.activation is not None]
    assert declaring
    for scheme in declaring:
        assert scheme.activation is not None
        assert can_quantize(scheme.activation, scheme.weight), scheme.name


def test_inputs_with_implied_scales_of_weights_with_e8m0_scales_are_not_supported() -> None:
    assert not can_quantize(PER_GROUP_OF_32, SCHEMES["mxfp8"].weight)
    assert not can_quantize(PER_GROUP, WeightSpec(E4M3, BLOCK_128, E8M0))


def test_inputs_of_the_preset_mxfp4xfp8_have_float_scales_beside_weights_with_e8m0_scales() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    inputs = quantization.preset_name_to_scheme("MXFP4XFP8", ["Linear"]).input_activations
    assert (inputs.num_bits, inputs.group_size, inputs.scale_dtype) == (8, 128, None)
    assert can_quantize(PER_GROUP, SCHEMES["mxfp4"].weight)


def test_a_spec_is_described_by_element_granularity_and_kind() -> None:
    assert str(PER_TOKEN) == "E4M3 per token (dynamic)"
    assert str(STATIC) == "E4M3 per tensor (static)"
    assert str(MXFP4) == "E2M1 per group 1x32, E8M0 scales (dynamic)"
    assert str(NVFP4) == "E2M1 per group 1x16, E4M3 scales (dynamic under a static global scale)"
    assert str(ActivationSpec(E4M3, block_granularity(1, 64), dynamic=True)) == ("E4M3 per group 1x64 (dynamic)")
