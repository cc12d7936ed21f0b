"""The Triton quantizer of inputs against the reference, bit for bit; `test_triton.py` runs this file."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPES, inputs
from quantize_cases import every_binade, sixteen_bit_values, ties_and_neighbours
from triton_cases import device

from minifloat.kernels.inputs import quantize_inputs, triton
from minifloat.numerics.activation import quantize_activation
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import GROUP_32, GROUP_128, TENSOR, TOKEN
from minifloat.numerics.scheme import ActivationSpec

DEVICE = device()
STATIC = ActivationSpec(E4M3, TENSOR, dynamic=False)
DYNAMIC = {g.name: ActivationSpec(E4M3, g, dynamic=True) for g in (TENSOR, TOKEN, GROUP_128, GROUP_32)}
#: Around groups and what a program takes (2048, 8192).
LONG = (3, 9000)
SHAPES = ((1, 1), (3, 17), (5, 130), (17, 300), (2, 2049), LONG, (0, 5), (3, 0))
SCALES = (1.0, 0.0123, 1 / 3, 2.0**-9, 1e30, 2.0**-126, 1e-40)

dynamic_specs = pytest.mark.parametrize("spec", DYNAMIC.values(), ids=DYNAMIC)


def check(x: torch.Tensor, spec: ActivationSpec, scale: float | None = None, row_multiple: int = 1) -> None:
    given = None if scale is None else torch.tensor(scale)
    expected, grid = quantize_activation(x, spec, given)
    on_device = None if given is None else given.to(DEVICE)
    codes, scales = quantize_inputs(x.to(DEVICE), spec, on_device, row_multiple=row_multiple, impl="triton")
    rows = x.shape[0]
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.shape[0] == -(-rows // row_multiple) * row_multiple
    assert torch.equal(codes[:rows].view(torch.uint8).cpu(), expected)
    assert not codes[rows:].view(torch.uint8).any()
    if not x.numel():
        return
    scales = scales[:rows].cpu()
    if spec.granularity == TENSOR:
        assert scales.shape == (1, 1)
        grid = grid[:rows]
    torch.testing.assert_close(scales, grid[: scales.shape[0]], rtol=0, atol=0, equal_nan=True)


@dynamic_specs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_shapes(spec: ActivationSpec, dtype: torch.dtype) -> None:
    in_groups = DEVICE == "cpu" and spec.granularity.cols is not None  # a row beyond a program concerns whole rows only
    for seed, shape in enumerate(SHAPES):
        if (spec.granularity != TENSOR or min(shape)) and not (in_groups and shape == LONG):
            check(inputs(*shape, dtype, seed), spec)  # the oracle has no amax of nothing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_shapes_with_a_given_scale(dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        check(inputs(*shape, dtype, seed), STATIC, 0.0071)  # some are clamped


@dynamic_specs
def test_appended_rows_are_zeros_and_change_nothing(spec: ActivationSpec) -> None:
    for rows in (1, 15, 16, 17):
        check(inputs(rows, 300), spec, row_multiple=16)


@pytest.mark.parametrize("scale", SCALES)
def test_every_value_of_bfloat16_under_a_given_scale(scale: float) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    check(values.view(8, 8192), STATIC, scale)


@pytest.mark.parametrize("scale", SCALES)
def test_float32_of_every_binade_under_a_given_scale(scale: float) -> None:
    for order in every_binade(3, 5130):
        check(order, STATIC, scale)


@dynamic_specs
def test_every_magnitude_in_blocks(spec: ActivationSpec) -> None:
    for order in sixteen_bit_values(torch.bfloat16):
        check(order.reshape(128, 512), spec)


@dynamic_specs
@pytest.mark.parametrize("special", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_blocks_with_nan_or_inf_among_others(spec: ActivationSpec, special: float) -> None:
    for position in (0, 127, 128, 299):
        x = inputs(4, 300)
        x[2, position] = special
        check(x, spec)


@pytest.mark.parametrize("scale", [1.0, 0.75, 1 / 3])
def test_ties_and_their_neighbours(scale: float) -> None:
    check(ties_and_neighbours(E4M3, scale), STATIC, scale)


@dynamic_specs
def test_zeros_and_the_smallest_numbers(spec: ActivationSpec) -> None:
    x = torch.zeros(4, 300)
    x[1] = -0.0
    x[2] = 2.0**-149
    x[3, 10] = -(2.0**-140)
    check(x, spec)


@dynamic_specs
def test_rows_may_have_a_stride(spec: ActivationSpec) -> None:
    wide = torch.full((5, 401), torch.nan)
    wide[:, 1:301] = inputs(5, 300)
    expected, _ = quantize_activation(wide[:, 1:301], spec)
    for x in (wide.to(DEVICE)[:, 1:301], wide.to(DEVICE)[:, 1:301].t().contiguous().t()):
        codes, _ = quantize_inputs(x, spec, impl="triton")
        assert torch.equal(codes.view(torch.uint8).cpu(), expected)


def test_a_row_longer_than_a_program_takes_is_read_in_parts() -> None:
    assert not triton.kernel_arguments(DYNAMIC["token"], torch.float32, 9000, given=False)["WHOLE"]
    assert triton.kernel_arguments(DYNAMIC["token"], torch.float32, 8192, given=False)["WHOLE"]
