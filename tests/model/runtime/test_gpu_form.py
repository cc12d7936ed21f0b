"""Modules that hold a weight in the form of a GPU's kernels: copies, moves, state dicts. On the CPU, where that form is
plain tensors and the reference multiplies it; what needs a GPU is skipped without one.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch

from minifloat.errors import KernelUnavailable
from minifloat.kernels.linear.triton import GpuWeight, why_unavailable
from minifloat.kernels.linear.triton.layout import Order
from minifloat.kernels.linear.triton.weight import arrange
from minifloat.model.runtime.linear import Packing, QuantizedLinear
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor

schemes = pytest.mark.parametrize("scheme", SCHEMES)


def quantized(scheme: str) -> QuantizedTensor:
    weight = torch.randn(70, 160, generator=torch.Generator().manual_seed(1))
    return quantize_tensor(weight, SCHEMES[scheme].weight)


def module_of(scheme: str) -> QuantizedLinear:
    module = QuantizedLinear(quantized(scheme), torch.float32)
    module._hold(arrange(module.quantized, Order.NARROW))
    return module


def assert_holds(module: QuantizedLinear, scheme: str) -> None:
    assert torch.equal(module.quantized.codes, quantized(scheme).codes)
    assert torch.equal(module.quantized.scale, quantized(scheme).scale)


@schemes
def test_a_weight_is_held_in_one_form_only(scheme: str) -> None:
    module = module_of(scheme)
    assert module.is_packed
    assert isinstance(module.held, GpuWeight)
    assert not hasattr(module, "codes")
    assert {f"gpu_{name}" for name, _ in module.held.tensors()} == set(dict(module.named_buffers()))
    assert_holds(module, scheme)
    module.unpack()
    assert not module.is_packed
    assert not [name for name, _ in module.named_buffers() if name.startswith("gpu_")]
    assert_holds(module, scheme)


@schemes
def test_the_form_is_kept_by_copies_pickles_and_state_dicts(scheme: str) -> None:
    module = module_of(scheme)
    x = torch.randn(3, 160)
    expected = module(x)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert isinstance(other.held, GpuWeight)
        assert torch.equal(other(x), expected)
    other = module_of(scheme)
    other.load_state_dict(module.state_dict(), assign=True)
    assert isinstance(other.held, GpuWeight)
    assert other.held.codes is other.gpu_codes
    assert torch.equal(other(x), expected)


@schemes
def test_a_cast_changes_the_dtype_and_no_scale(scheme: str) -> None:
    module = module_of(scheme).half()
    assert isinstance(module.held, GpuWeight)
    assert module.held.row_scale.dtype == torch.float32
    assert module.weight.dtype == torch.float16
    assert_holds(module, scheme)


@schemes
def test_a_move_to_another_device_or_to_float64_unpacks_it(scheme: str) -> None:
    assert_holds(module_of(scheme).double(), scheme)
    assert not module_of(scheme).double().is_packed
    assert not module_of(scheme).to("meta").is_packed


def test_kernels_of_another_device_than_the_models_are_refused() -> None:
    with pytest.raises(KernelUnavailable, match="impl='triton' computes on cuda devices, and the model goes to cpu"):
        Packing("triton", torch.device("cpu"))
    with pytest.raises(KernelUnavailable, match="impl='cpu' computes on cpu devices, and the model goes to cuda"):
        Packing("cpu", torch.device("cuda"))


@schemes
@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())
def test_gpu_modules_are_packed_there_and_unpacked_when_they_leave(scheme: str) -> None:
    module = QuantizedLinear(quantized(scheme), torch.bfloat16).cuda()
    x = torch.randn(3, 160, device="cuda").bfloat16()
    plain = module(x)
    assert module.pack() == ""
    assert isinstance(module.held, GpuWeight)
    difference = (module(x) - plain).float()  # the reference rounds weights to bfloat16
    assert float(difference.norm() / plain.float().norm()) < 5e-3
    assert_holds(module.cpu(), scheme)
    assert not module.is_packed
