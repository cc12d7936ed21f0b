"""Modules with packed weights: what moves, copies and casts make of them, and what `load` says where none is packed."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from minifloat.errors import KernelUnavailable, NonFiniteError, ShapeError, UnknownNameError
from minifloat.kernels import native
from minifloat.model.runtime.experts import ExpertFactor, QuantizedExperts
from minifloat.model.runtime.linear import QuantizedLinear, QuantizedWeight
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor
from minifloat.quantize.job import quantize_checkpoint

MakeModel = Callable[..., Path]
needs_library = pytest.mark.skipif(native.load() is None, reason=native.why_unavailable())
MISSING = "the library was not built"


def quantized(scheme: str, rows: int = 48, cols: int = 96, seed: int = 0) -> QuantizedTensor:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return quantize_tensor(weight, SCHEMES[scheme].weight)


def packed_linear(scheme: str, seed: int = 0) -> QuantizedLinear:
    module = QuantizedLinear(quantized(scheme, seed=seed), torch.float32)
    assert module.pack() == ""
    return module


def assert_equal(weight: torch.Tensor, expected: torch.Tensor) -> None:
    """To the last bit but one of float32: the divisor above the scales of NVFP4 is packed as a factor."""
    torch.testing.assert_close(weight, expected, rtol=2.0**-22, atol=0)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_result", native.LoadResult(None, MISSING))


# ----------------------------------------------------------------------------------------------------- one module


@needs_library
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packing_forgets_the_codes_and_keeps_the_weight(scheme: str) -> None:
    module, stored = packed_linear(scheme), quantized(scheme)
    assert module.is_packed
    assert [name for name, _ in module.named_buffers()] == ["packed"]
    assert_equal(module.weight, stored.dequantize())
    assert torch.equal(module.quantized.codes, stored.codes)
    assert module.nbytes == stored.nbytes


@needs_library
@pytest.mark.parametrize("scheme", SCHEMES)
def test_unpacking_restores_the_packed_weight(scheme: str) -> None:
    module, x = packed_linear(scheme), torch.randn(3, 96)
    packed = module(x)
    module.unpack()
    assert not module.is_packed
    assert_equal(module.weight, quantized(scheme).dequantize())
    torch.testing.assert_close(module(x), packed, rtol=1e-5, atol=1e-5)
    assert module.pack() == ""
    assert torch.equal(module(x), packed)


COPIES: dict[str, Callable[[QuantizedLinear], QuantizedLinear]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "share_memory": lambda module: module.share_memory(),
}


@needs_library
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("shape", [(48, 96), (1100, 2048)], ids=["small", "in large pages"])
def test_a_copy_is_packed_and_multiplies_alike(how: str, shape: tuple[int, int]) -> None:
    module, x = QuantizedLinear(quantized("fp8-block", *shape), torch.float32), torch.randn(2, shape[1])
    module.pack()
    expected = module(x)
    other = COPIES[how](module)
    assert other.is_packed
    assert torch.equal(other(x), expected)
    assert torch.equal(other.weight, module.weight)


@needs_library
def test_a_state_dict_brings_another_packed_weight() -> None:
    module, other, x = packed_linear("fp8", seed=1), packed_linear("fp8", seed=2), torch.randn(2, 96)
    before = module(x)
    module.load_state_dict(other.state_dict())
    assert not torch.equal(module(x), before)
    assert torch.equal(module(x), other(x))


@needs_library
def test_a_state_dict_of_another_shape_with_as_many_bytes_is_refused() -> None:
    module, wide = (QuantizedWeight(quantized("fp8", *shape), torch.float32) for shape in ((64, 128), (128, 64)))
    module.pack(), wide.pack()
    state = wide.state_dict()
    state["packed"] = nn.functional.pad(
        state["packed"], (0, module.state_dict()["packed"].numel() - state["packed"].numel())
    )
    module.load_state_dict(state)
    with pytest.raises(ShapeError, match="packed weight 64x128, got one of 128x64"):
        module.multiply(torch.randn(1, 128))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_to_16_bits_leaves_the_packed_weight_alone(dtype: torch.dtype) -> None:
    module = packed_linear("fp8")
    data = module.get_buffer("packed")
    module.to(dtype)
    assert module.get_buffer("packed") is data
    assert module.weight.dtype == dtype
    assert module(torch.ones(1, 96, dtype=dtype)).dtype == dtype


@needs_library
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_made_double_is_unpacked_and_still_multiplies(scheme: str) -> None:
    module, x = packed_linear(scheme).double(), torch.randn(2, 96).double()
    assert not module.is_packed
    expected = x @ quantized(scheme).dequantize().double().T
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@needs_library
def test_a_move_to_another_device_unpacks() -> None:
    module = packed_linear("nvfp4").to("meta")
    assert {name: buffer.device.type for name, buffer in module.named_buffers()} == {
        "codes": "meta",
        "scale": "meta",
        "global_scale": "meta",
    }
    assert "it is on meta" in module.pack()


@needs_library
def test_the_repr_says_that_it_is_packed() -> None:
    assert repr(packed_linear("mxfp4")) == (
        "QuantizedLinear([48, 96], E2M1, group 1x32, E8M0 scales, packed, bias=False)"
    )


def test_a_scale_that_is_not_finite_is_not_packed() -> None:
    stored = quantized("fp8")
    stored.scale[0] = torch.nan
    module = QuantizedWeight(stored, torch.float32)
    if native.load() is not None:
        with pytest.raises(NonFiniteError):
            module.pack()
    assert not module.is_packed


@pytest.mark.usefixtures("no_library")
def test_without_the_library_a_weight_stays_unpacked_with_a_reason() -> None:
    module = QuantizedLinear(quantized("fp8"), torch.float32)
    assert module.pack() == MISSING
    assert not module.is_packed


@needs_library
@pytest.mark.parametrize("scheme", ["fp8", "mxfp4", "nvfp4"])
def test_a_packed_expert_of_two_parts_is_one_product(scheme: str) -> None:
    parts = [QuantizedWeight(quantized(scheme, seed=seed), torch.bfloat16) for seed in (1, 2)]
    factor = QuantizedExperts([parts], False, multiplied=True)[0]
    assert isinstance(factor, ExpertFactor)
    x = torch.randn(3, 96).bfloat16()
    expected = x.double() @ torch.cat([part.weight.double() for part in parts]).T
    for part in parts:
        part.pack()
    found = nn.functional.linear(x, factor)  # type: ignore[arg-type]
    assert torch.equal(found, torch.cat([part.multiply(x) for part in parts], dim=-1))
    assert (found.double() - expected).norm() < 5e-3 * expected.norm()


# --------------------------------------------------------------------------------------------------- whole models


@pytest.fixture(scope="module")
def folder(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "fp8-block"
    quantize_checkpoint(llama_folder, out, "fp8-block")
    return out


def held(model: nn.Module) -> list[bool]:
    return [module.is_packed for module in model.modules() if isinstance(module, QuantizedWeight)]


@needs_library
def test_load_packs_every_quantized_weight_and_says_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "minifloat"):
        assert held(load(folder)) == [True] * 14
        assert held(load(folder, LoadOptions(impl="cpu"))) == [True] * 14
        assert held(load(folder, LoadOptions(impl="reference"))) == [False] * 14
        assert held(load(folder, LoadOptions(device="meta"))) == [False] * 14
    assert not caplog.text


@pytest.mark.usefixtures("no_library")
def test_without_the_library_load_warns_once_with_the_reason(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "minifloat"):
        assert held(load(folder)) == [False] * 14
    assert caplog.text.count(MISSING) == 1
    assert "14 of 14 quantized weights are multiplied by the slow reference" in caplog.text


@pytest.mark.usefixtures("no_library")
def test_an_implementation_that_is_named_and_cannot_run_is_an_error(folder: Path) -> None:
    with pytest.raises(KernelUnavailable, match=rf"\w_proj: .*{MISSING}"):
        load(folder, LoadOptions(impl="cpu"))


def test_an_implementation_that_does_not_exist_is_refused(folder: Path) -> None:
    with pytest.raises(UnknownNameError, match="auto, reference, cpu"):
        load(folder, LoadOptions(impl="gpu"))


@needs_library
def test_experts_that_are_not_only_multiplied_stay_unpacked_and_are_named(
    make_mixtral: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("minifloat.model.runtime.load.multiplies_experts", lambda *_: False)
    quantize_checkpoint(make_mixtral(tmp_path / "plain"), tmp_path / "q", "mxfp4")
    with caplog.at_level(logging.WARNING, "minifloat"):
        model = load(tmp_path / "q")
    assert sorted(held(model)) == [False] * 24 + [True] * 8
    assert "24 of 32 quantized weights are multiplied by the slow reference, because the code of their" in caplog.text
    with pytest.raises(KernelUnavailable, match="does more with a weight than multiply"):
        load(tmp_path / "q", LoadOptions(impl="cpu"))


@needs_library
@pytest.mark.parametrize("model_type", ["llama", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("scheme", ["fp8", "mxfp4"])
def test_in_16_bits_the_kernels_are_at_least_as_near_to_float32_as_the_reference(
    make_model: MakeModel, tmp_path: Path, model_type: str, scheme: str
) -> None:
    quantize_checkpoint(make_model(tmp_path / "plain", model_type), tmp_path / "q", scheme)
    ids = torch.tensor([[3, 41, 17, 59, 8, 26, 33, 50]])
    with torch.no_grad():
        exact = load(tmp_path / "q", LoadOptions(dtype=torch.float32, impl="reference"))(ids).logits
        errors = [
            (load(tmp_path / "q", LoadOptions(impl=impl))(ids).logits - exact).norm() for impl in ("cpu", "reference")
        ]
    assert errors[0] < 1.2 * errors[1] + 1e-6 * exact.norm()
