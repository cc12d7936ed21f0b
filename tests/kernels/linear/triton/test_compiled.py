"""The kernels compiled for GPUs without a GPU: counts of the machine instructions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
import triton
from gpu_compile import A100, B200, H200, L40S, SHAPES, Compiled, compile_dequantize, compile_product
from modes import each_value, full
from triton_cases import run_cases

from minifloat.kernels.linear.triton.config import Device, by_arithmetic
from minifloat.kernels.linear.triton.layout import GpuForm
from minifloat.kernels.linear.triton.product import PARTS

#: Instructions per weight of up to 16 rows of x and a weight of many rows.
MOST = {GpuForm.FP8: 2.6, GpuForm.FP8_BLOCK: 2.9, GpuForm.MXFP8: 3.1, GpuForm.MXFP4: 3.1, GpuForm.NVFP4: 3.4}
#: What triton 3.6 needs more.
MORE_BEFORE_3_7 = 0.25
MOST_OF_ANY = 5.6  #: with more rows of x, fewer of the weight, or blocks
MANY = SHAPES[1]

forms = pytest.mark.parametrize("form", GpuForm)


def compiled(form: GpuForm, shape: tuple[int, int], rows: int, dtype: torch.dtype, device: Device) -> Compiled:
    config = by_arithmetic(form, shape, rows, PARTS[dtype], device)
    assert not config.is_large
    result = compile_product(form, config, dtype, device, bias=True)
    assert result.stack == 0
    assert result.slow == []
    assert result.tensor_core > 0
    assert result.shared_bytes <= device.shared_bytes
    assert result.first_axis_in_a_lane == 1  # the two units of a word, which the decoding PTX takes as one register
    return result


@forms
def test_few_instructions_per_weight_on_hopper(form: GpuForm) -> None:
    result = compiled(form, MANY, 16, torch.bfloat16, H200)
    assert result.per_weight <= MOST[form] + (MORE_BEFORE_3_7 if triton.__version__ < "3.7" else 0)
    assert result.shared_bytes <= H200.shared_bytes // 2  # two at a time


@forms
@pytest.mark.parametrize("rows", [full(32), 64, full(128)])
def test_more_rows_of_x_on_hopper(form: GpuForm, rows: int) -> None:
    assert compiled(form, MANY, rows, torch.bfloat16, H200).per_weight <= MOST_OF_ANY


@forms
def test_weights_of_few_rows_on_hopper(form: GpuForm) -> None:
    assert compiled(form, SHAPES[0], 16, torch.bfloat16, H200).per_weight <= 4.0


@pytest.mark.parametrize(
    ("form", "dtype"), each_value([GpuForm.FP8_BLOCK, GpuForm.MXFP4], [torch.float16, torch.float32]), ids=str
)
def test_other_dtypes_of_x_on_hopper(form: GpuForm, dtype: torch.dtype) -> None:
    for rows in (1, 64):
        compiled(form, MANY, rows, dtype, H200)


@pytest.mark.parametrize(
    ("form", "device"), each_value(list(GpuForm), [A100, L40S, B200]), ids=lambda value: value.name
)
def test_other_devices(form: GpuForm, device: Device) -> None:
    for rows in (16, 64):
        compiled(form, MANY, rows, torch.bfloat16, device)


@pytest.mark.parametrize("device", [A100, H200, B200], ids=lambda device: device.name)
def test_decoding_into_memory(device: Device) -> None:
    for form in GpuForm:
        assert compile_dequantize(form, torch.bfloat16, device).stack == 0


def test_a_kernel_without_a_product_loop_has_no_loop_in_its_counts() -> None:
    result = compile_dequantize(GpuForm.FP8, torch.bfloat16, H200)
    assert result.tensor_core == 0
    assert not result.loop


def test_the_kernels_match_float64_in_the_interpreter() -> None:
    run_cases(Path(__file__).with_name("triton_cases_linear.py"), interpreted=True)
