"""`pack` against its reference, byte for byte, and the memory of a packed weight."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch

from minifloat.errors import KernelUnavailable, UnknownNameError
from minifloat.kernels import native
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.linear import linear
from minifloat.kernels.pack import HUGE_PAGE, PackedWeight, pack, reference, why_not
from minifloat.kernels.pack.layout import BLOCK, ROW, Header
from minifloat.numerics.formats import E4M3, E8M0
from minifloat.numerics.granularity import BLOCK_128, GROUP_32, GROUP_128
from minifloat.numerics.scheme import SCHEMES, ScaleRule, WeightSpec
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor

ISAS = native.load().isas if native.load() else ()
SPECS = {name: scheme.weight for name, scheme in SCHEMES.items()} | {
    "fp8 per group": WeightSpec(E4M3, GROUP_128),
    "fp8 block, E8M0": WeightSpec(E4M3, BLOCK_128, E8M0, ScaleRule.RCEIL),
}
SHAPES = [(1, 32), (33, 100), (64, 128), (161, 384), (300, 160)]

native_only = pytest.mark.skipif(not ISAS, reason=native.why_unavailable())
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def weight_of(spec: WeightSpec, shape: tuple[int, int]) -> QuantizedTensor:
    return quantize_tensor(torch.randn(shape, generator=torch.Generator().manual_seed(1)), spec)


def any_bytes(spec: WeightSpec, shape: tuple[int, int]) -> QuantizedTensor:
    """A weight of random codes and coded scales, NaN and far-apart E8M0 among them, and one row of zeros."""
    generator = torch.Generator().manual_seed(3)
    plain = weight_of(spec, shape)
    codes = torch.randint(0, 256, plain.codes.shape, dtype=torch.uint8, generator=generator)
    codes[::2] &= 0x3B  # rows without NaN
    codes[0] = 0
    scale = plain.scale
    if scale.dtype == torch.uint8 and spec.granularity == GROUP_32:
        scale = torch.randint(0, 256, scale.shape, dtype=torch.uint8, generator=generator)
        scale[::4].clamp_(max=254)
    return QuantizedTensor(spec, shape, codes, scale, plain.global_scale)


def reference_of(packed: PackedWeight) -> torch.Tensor:
    weight = torch.empty(packed.shape, dtype=packed.dtype)
    reference.unpack(weight, None, packed.form, packed.data)
    return weight


def decoded(weight: QuantizedTensor) -> torch.Tensor:
    return weight.block_scale() if weight.spec.scale is E8M0 else weight.scale


@native_only
@pytest.mark.parametrize("isa", ISAS)
@specs
def test_the_native_packer_writes_the_bytes_of_the_reference(spec: WeightSpec, isa: str) -> None:
    with native.using(isa):
        for shape in SHAPES:
            for weight in (weight_of(spec, shape), any_bytes(spec, shape)):
                expected = pack(weight, impl="reference")
                for threads in (1, 3):
                    assert torch.equal(pack(weight, impl="cpu", threads=threads).data, expected.data), shape


@native_only
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_floats_are_packed_as_by_the_reference_and_unpacked_again(isa: str, dtype: torch.dtype) -> None:
    with native.using(isa):
        for shape in ((1, 1), (33, 101), (70, 256)):
            weight = torch.randn(shape).to(dtype)
            packed = pack(weight, impl="cpu")
            assert torch.equal(packed.data, pack(weight, impl="reference").data)
            assert torch.equal(packed.unpack(), weight)
            assert torch.equal(reference_of(packed), weight)


@native_only
@pytest.mark.parametrize("isa", ISAS)
@specs
def test_unpacking_is_that_of_the_reference(spec: WeightSpec, isa: str) -> None:
    for shape in SHAPES:
        packed = pack(any_bytes(spec, shape))
        with native.using(isa):
            result = packed.unpack()
        assert isinstance(result, QuantizedTensor)
        codes, scale = torch.full_like(result.codes, 0x55), torch.full_like(result.scale, 0x55)
        inline = packed.form.grid not in (ROW, BLOCK)
        grid = scale if inline else scale.float()
        reference.unpack(codes, grid, packed.form, packed.data)
        assert torch.equal(result.codes, codes)
        assert torch.equal(result.scale if inline else decoded(result), grid)


@specs
def test_a_nan_makes_its_row_nan_and_no_other(spec: WeightSpec) -> None:
    weight = any_bytes(spec, (161, 384))
    exact = weight.dequantize()
    result = pack(weight).dequantize()
    nan = exact.isnan().any(dim=1)
    assert torch.equal(result.isnan(), nan[:, None].expand_as(result))
    largest = exact[~nan].abs().amax()
    torch.testing.assert_close(result[~nan], exact[~nan], rtol=1e-6, atol=float(largest) * 2.0**-120)


@native_only
def test_a_large_weight_lies_in_large_pages_and_its_copies_anywhere() -> None:
    weight = torch.randn(1024, 2048).to(torch.bfloat16)
    packed = pack(weight)
    assert packed.data.data_ptr() % HUGE_PAGE == 0
    x = torch.randn(3, 2048)
    expected = linear(x, packed)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert other.data.data_ptr() != packed.data.data_ptr()
        assert torch.equal(linear(x, other), expected)


def test_packing_changes_neither_codes_nor_scales() -> None:
    weight = any_bytes(SPECS["mxfp4"], (70, 96))
    before = copy.deepcopy(weight)
    pack(weight)
    assert torch.equal(weight.codes, before.codes)
    assert torch.equal(weight.scale, before.scale)


@pytest.mark.parametrize(
    ("spec", "shape", "device", "dtype", "words"),
    [
        (None, (4, 4), "cpu", torch.float64, "float64"),
        (None, (4, 4), "cuda", torch.bfloat16, "cuda"),
        (None, (4,), "cpu", torch.bfloat16, r"\[4\]"),
        (SPECS["fp8"], (0, 4), "cpu", torch.uint8, "empty"),
        (WeightSpec(SPECS["mxfp4"].element, GROUP_128), (4, 256), "cpu", torch.uint8, "E2M1 with FP32 scales"),
    ],
)
def test_why_not_gives_the_reason_for_weights_without_a_packed_form(
    spec: WeightSpec | None, shape: tuple[int, ...], device: str, dtype: torch.dtype, words: str
) -> None:
    assert re.search(words, why_not(spec, shape, device, dtype))


@specs
def test_weights_of_every_scheme_have_a_packed_form(spec: WeightSpec) -> None:
    assert why_not(spec, (33, 96), "cpu") == ""


def test_the_header_describes_the_weight() -> None:
    packed = pack(weight_of(SPECS["fp8-block"], (300, 160)))
    header = Header.read(bytes(packed.data[: Header.FORMAT.size].numpy()))
    assert isinstance(header, Header)
    assert (header.rows, header.cols, header.total) == (300, 160, packed.nbytes)


def test_another_implementation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(SPECS["fp8"], (4, 32))
    with pytest.raises(UnknownNameError, match="triton"):
        pack(weight, impl="triton")
    monkeypatch.setattr(native, "_result", native.LoadResult(None, "not built"))
    with pytest.raises(KernelUnavailable, match="not built"):
        pack(weight, impl="cpu")
    assert torch.equal(pack(weight).data, pack(weight, impl="reference").data)
