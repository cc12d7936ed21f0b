"""Packing for a GPU, in plain PyTorch: the round trip to the same codes and scales, and unsupported weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_cases import GPU_KINDS, case, quantized
from kernel_cases import FLOATS, KINDS, Stored, finite_codes, make

from minifloat.errors import KernelUnavailable, NonFiniteError, UnsupportedTensorError
from minifloat.kernels.linear import linear
from minifloat.kernels.linear.triton import pack, why_not, why_unavailable
from minifloat.kernels.linear.triton.layout import GpuForm, Order, form_of
from minifloat.kernels.linear.triton.weight import GpuWeight, arrange
from minifloat.numerics.formats import E2M1, E4M3, E8M0
from minifloat.numerics.tensor import QuantizedTensor

SHAPES = ((1, 32), (64, 128), (70, 160), (129, 96), (260, 416))

orders = pytest.mark.parametrize("order", Order)


def assert_same(back: QuantizedTensor, weight: QuantizedTensor) -> None:
    """Bit for bit, so that NaNs compare too."""
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.scale.view(torch.uint8), weight.scale.view(torch.uint8))
    if weight.global_scale is not None:
        assert torch.equal(back.global_scale, weight.global_scale)
    assert (back.spec, back.shape, back.global_divides) == (weight.spec, weight.shape, weight.global_divides)


@orders
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_unpacking_gives_the_bits_that_were_packed(kind: str, order: Order) -> None:
    for rows, cols in SHAPES:
        weight, _ = case(kind, rows, cols)
        assert_same(arrange(weight, order).unpack(), weight)


@orders
@pytest.mark.parametrize("kind", ["fp8-channel", "mxfp8"])
def test_every_e4m3_code_survives_nan_too(kind: str, order: Order) -> None:
    stored = make(kind, 3, 256)
    stored.codes[:] = torch.stack([torch.arange(256, dtype=torch.uint8).roll(shift) for shift in (0, 1, 77)])
    weight = quantized(stored)
    packed = arrange(weight, order)
    assert_same(packed.unpack(), weight)
    assert packed.row_scale[:3].isnan().all()


@orders
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_every_e2m1_code_survives_in_every_place(kind: str, order: Order) -> None:
    stored = make(kind, 16, 64)
    stored.codes[:] = torch.stack([torch.arange(16, dtype=torch.uint8).roll(shift).repeat(4) for shift in range(16)])
    assert_same(arrange(quantized(stored), order).unpack(), quantized(stored))


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
def test_scales_that_factors_cannot_represent_are_restored(kind: str) -> None:
    stored = make(kind, 6, 128)
    assert stored.scales is not None
    stored.scales[0] = torch.tensor([254, 0, 3, 128], dtype=torch.uint8)  # flushed beside the largest
    stored.scales[1, 2] = E8M0.nan_code or 0
    stored.scales[2] = 0
    stored.codes[3, 32:64] = 0  # zeros, under a larger scale than all others
    stored.scales[3, 1] = 254
    stored.codes[4] = 0
    weight = quantized(stored)
    packed = arrange(weight, Order.NARROW)
    assert_same(packed.unpack(), weight)
    assert packed.row_scale[:6].isnan().tolist() == [False, True, False, False, False, False]
    usual = arrange(quantized(make(kind, 6, 128)), Order.NARROW)
    assert usual.scale is None  # and are not held twice where the factors tell them


def test_every_e4m3_scale_survives() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    usual = codes[1 : E4M3.max_code + 1]
    for scales in (usual, codes[codes & 0x7F != 0]):
        stored = Stored(KINDS["nvfp4"], make("nvfp4", len(scales), 16).codes, scales[:, None].clone(), 0.3)
        packed = arrange(quantized(stored), Order.NARROW)
        assert_same(packed.unpack(), quantized(stored))
        assert (packed.scale is None) == (scales is usual)
        assert torch.equal(packed.row_scale[: len(scales)].isnan(), (scales & 0x7F) == E4M3.nan_code)


def test_elements_under_a_scale_of_zero_come_back_as_zeros() -> None:
    stored = make("nvfp4", 2, 32)
    assert stored.scales is not None
    stored.scales[:, 0] = torch.tensor([0, 0x80], dtype=torch.uint8)
    back = arrange(quantized(stored), Order.NARROW).unpack()
    assert (back.dequantize()[:, :16] == 0).all()
    assert torch.equal(back.dequantize()[:, 16:], quantized(stored).dequantize()[:, 16:])
    assert torch.equal(back.scale, stored.scales)


def test_a_packed_weight_takes_little_more_than_the_checkpoint() -> None:
    for kind in GPU_KINDS:
        weight, _ = case(kind, 512, 1024)
        assert weight.nbytes <= arrange(weight, Order.NARROW).nbytes <= weight.nbytes + 4 * 512 + 64


def test_every_supported_weight_has_its_form() -> None:
    quantized_kinds = [name for name, kind in KINDS.items() if kind.element not in FLOATS]
    forms = {kind: form_of(case(kind, 256, 256)[0].spec, (256, 256)) for kind in quantized_kinds}
    assert {kind: form for kind, form in forms.items() if isinstance(form, GpuForm)} == {
        "fp8-tensor": GpuForm.FP8,
        "fp8-channel": GpuForm.FP8,
        "fp8-block-128": GpuForm.FP8_BLOCK,
        "fp8-group-128": GpuForm.FP8_BLOCK,
        "mxfp8": GpuForm.MXFP8,
        "mxfp4": GpuForm.MXFP4,
        "nvfp4": GpuForm.NVFP4,
    }
    assert "E4M3 with FP32 scales per block 64x64" in str(forms["fp8-block-64"])


def test_a_weight_without_a_form_is_refused_with_the_reason() -> None:
    weight, _ = case("fp8-block-64", 128, 128)
    with pytest.raises(UnsupportedTensorError, match="there is no kernel for E4M3 with FP32 scales per block 64x64"):
        arrange(weight, Order.NARROW)


@pytest.mark.parametrize(("kind", "name"), [("fp8-channel", "scale"), ("fp8-block-128", "scale")])
def test_a_scale_that_is_not_finite_is_refused(kind: str, name: str) -> None:
    weight, _ = case(kind, 128, 256)
    weight.scale[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=name):
        arrange(weight, Order.NARROW)


def test_a_tensor_scale_that_is_not_finite_is_refused() -> None:
    weight, _ = case("nvfp4", 128, 256)
    assert weight.global_scale is not None
    weight.global_scale.fill_(torch.inf)
    with pytest.raises(NonFiniteError, match="global_scale"):
        arrange(weight, Order.NARROW)


def test_weights_on_the_cpu_are_not_for_a_gpu() -> None:
    weight, _ = case("mxfp4", 128, 256)
    assert why_not(weight.spec, weight.shape, "cpu") == "Triton kernels run on CUDA devices, not on cpu"
    with pytest.raises(UnsupportedTensorError, match="Triton kernels run on CUDA devices, not on cpu"):
        pack(weight)


def on_cpu(kind: str) -> GpuWeight:
    return arrange(case(kind, 70, 160)[0], Order.NARROW)


def test_linear_without_a_gpu_multiplies_by_the_reference_or_says_why_not() -> None:
    x = torch.randn(3, 160)
    for kind in GPU_KINDS:
        weight = on_cpu(kind)
        for impl in ("auto", "reference"):
            assert torch.equal(linear(x, weight, impl=impl), linear(x, weight.unpack()))
        with pytest.raises(KernelUnavailable, match=r"linear\(impl='triton'\) cannot run: .*CUDA devices"):
            linear(x, weight, impl="triton")
    with pytest.raises(KernelUnavailable, match=r"pack this one, once, with kernels\.linear\.triton\.pack"):
        linear(x, case("mxfp4", 70, 160)[0], impl="triton")
    with pytest.raises(KernelUnavailable, match=r"pack this one, once, with kernels\.pack"):
        linear(x, on_cpu("mxfp4"), impl="cpu")


@orders
def test_every_element_has_a_place_of_its_own(order: Order) -> None:
    # One element at a time would take long: bit b of the number of each element at a time, as codes.
    rows, cols = 256, 256
    number = torch.arange(rows * cols).view(rows, cols)
    for kind, pool in (("fp8-tensor", finite_codes(E4M3)), ("mxfp4", finite_codes(E2M1))):
        for bit, one in itertools.product(range(16), (1, len(pool) - 1)):
            stored = make(kind, rows, cols)
            stored.codes[:] = torch.where(number >> bit & 1 == 1, pool[one], pool[0])
            assert torch.equal(arrange(quantized(stored), order).unpack().codes, quantized(stored).codes)


def test_why_the_kernels_cannot_run_is_a_constant_of_compiled_code() -> None:
    double = torch.compile(lambda x: x * (2 if why_unavailable(x.device) else 3), fullgraph=True, backend="eager")
    factor = 2 if why_unavailable("cpu") else 3
    assert torch.equal(double(torch.ones(2)), torch.full((2,), float(factor)))
