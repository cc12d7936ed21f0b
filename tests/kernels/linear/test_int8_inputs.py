"""Inputs rounded to int8 against float64 products of numbers that these tests round by themselves."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from decoder_cases import Session, Shape, prompt, random_decoder
from kernel_cases import (
    DTYPES,
    FLOATS,
    ISAS,
    KINDS,
    Element,
    Grid,
    Kernels,
    Packed,
    Stored,
    assert_close,
    bits,
    finite_codes,
    fits,
    inputs,
    make,
    product,
    values_of,
)

from minifloat.errors import KernelUnavailable
from minifloat.kernels import native
from minifloat.kernels.linear import int8, linear, linear_fused
from minifloat.kernels.native import CONSTANTS
from minifloat.kernels.pack import pack
from minifloat.numerics.formats import E2M1, E4M3
from minifloat.numerics.scheme import SCHEMES, ActivationSpec
from minifloat.numerics.tensor import quantize_tensor

GROUP = 64
#: Both sides of the tiles of 12 rows, one to many of them.
NUMBERS_OF_ROWS = (2, 3, 8, 11, 12, 13, 24, 25, 40, 64, 97)
COLS = (2, 31, 32, 63, 64, 65, 128, 160, 520)
#: What rounding of normally distributed inputs and weights in these formats may cost, as relative L2 error.
COSTS = {"fp8": 8.5e-3, "fp8-block": 9e-3, "mxfp8": 9e-3, "mxfp4": 7e-3, "nvfp4": 1.2e-2}

kinds = pytest.mark.parametrize("kind", KINDS)
_FLOAT_KINDS = [name for name, kind in KINDS.items() if kind.element in FLOATS]
quantized = pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.element not in FLOATS])


def groups(matrix: torch.Tensor, cols: int = GROUP) -> torch.Tensor:
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % cols)).reshape(matrix.shape[0], -1, cols)


def rounded_inputs(x: torch.Tensor, largest: int = 127) -> torch.Tensor:
    """`x` ``[M, K]`` in float64, rounded; the scale and its inverse are float32, as in the kernel."""
    parts = groups(x.float())
    amax = parts.abs().amax(2, keepdim=True).clamp_min(2.0**-100)
    integers = (parts * torch.div(torch.full_like(amax, largest), amax)).round()
    return (integers.double() * (amax / largest).double()).flatten(1)[:, : x.shape[1]]


@dataclasses.dataclass
class Rounded:
    """A weight ``[N, K]`` in float64 as kernels round it, and the largest integer of its inputs."""

    weight: torch.Tensor
    largest: int = 127


def rounded(stored: Stored, kernels: Kernels) -> Rounded:
    """A weight as the kernels of an instruction set round it."""
    if stored.kind.element in FLOATS:
        return Rounded(stored.values())
    elements = values_of(E4M3 if stored.kind.element is Element.E4M3 else E2M1)[stored.codes.long()]
    scales, factor = stored.scale_values(), float(torch.tensor(stored.factor, dtype=torch.float32))
    if kernels.library.isa == "avx2":
        if stored.kind.element is Element.E2M1:
            return Rounded(stored.values())
        # The largest exponent becomes that of 2^13; subnormal numbers have the exponent of the smallest normal ones.
        exponent = torch.floor(torch.log2(groups(elements.abs()).amax(2, keepdim=True).clamp_min(2.0**-6)))
        scaled = groups(elements) / torch.exp2(exponent - 13)
        integers = (scaled.abs() + 0.5).floor() * scaled.sign() * torch.exp2(exponent - 13)
        return Rounded(integers.flatten(1)[:, : elements.shape[1]] * scales * factor, 2047)
    if stored.kind.grid in (Grid.ROW, Grid.BLOCK):
        values, after = elements, scales * factor
        bounds = values.abs()
    else:
        values, after = elements * scales, torch.full_like(scales, factor)
        bounds = values.abs()
    if stored.kind.element is Element.E2M1:
        block = groups(bounds, stored.block[1])
        present = (block.amax(2, keepdim=True) > 0).expand_as(block).flatten(1)[:, : bounds.shape[1]]
        bounds = 6 * scales.abs() * present
    bound = groups(bounds).amax(2, keepdim=True)
    unit = torch.exp2(torch.ceil(torch.log2(torch.where(bound > 0, bound, 1.0) / 127)))
    scaled = groups(values) / unit
    away = (scaled.abs() + 0.5).floor() * scaled.sign()
    integers = away if stored.kind.grid is Grid.E4M3 else scaled.round()
    return Rounded((integers * unit).flatten(1)[:, : values.shape[1]] * after)


def check(kernels: Kernels, packed: Packed, weight: Rounded, x: torch.Tensor) -> None:
    """Compare with the oracle where the kernel rounds; elsewhere the bits are those without `int8_inputs`."""
    result = kernels.linear(x, packed, int8_inputs=True)
    if kernels.rounds_inputs(packed, x):
        oracle = rounded_inputs(x, weight.largest)
        exact = product(oracle, weight.weight)
        assert_close(result, exact, oracle, weight.weight)
    else:
        assert torch.equal(bits(result), bits(kernels.linear(x, packed)))


def rounds(kernels: Kernels, kind: str) -> bool:
    """Whether the instruction set rounds many rows of inputs of a format."""
    packed = kernels.pack(make(kind, 40, 256))
    return kernels.rounds_inputs(packed, torch.zeros(256, 256, dtype=torch.bfloat16))


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_rows(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    stored = make(kind, 100, 228)
    weight, packed = rounded(stored, kernels), kernels.pack(stored)
    x = inputs(max(NUMBERS_OF_ROWS), 228)
    x[:, 7] *= 30
    for m in NUMBERS_OF_ROWS:
        check(kernels, packed, weight, x[:m].to(dtype))


@quantized
def test_ragged_shapes(kernels: Kernels, kind: str) -> None:
    for rows, cols in itertools.product((1, 31, 33, 100), COLS):
        if not fits(kind, cols):
            continue
        stored = make(kind, rows, cols)
        packed = kernels.pack(stored)
        for m in (5, 13, 70):
            check(kernels, packed, rounded(stored, kernels), inputs(m, cols).bfloat16())


@quantized
def test_more_than_one_block_of_everything(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 300, 1100)
    packed, weight = kernels.pack(stored), rounded(stored, kernels)
    for m in (200, 900):
        check(kernels, packed, weight, inputs(m, 1100).bfloat16())


@quantized
def test_the_number_of_threads_changes_no_bit(kernels: Kernels, kind: str) -> None:
    packed = kernels.pack(make(kind, 300, 600))
    for m in (2, 8, 30, 150):
        x = inputs(m, 600).bfloat16()
        one, two = (kernels.linear(x, packed, threads=threads, int8_inputs=True) for threads in (1, 2))
        assert torch.equal(bits(one), bits(two))


@quantized
def test_avx_vnni_changes_no_bit(kind: str) -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if "avx2" not in ISAS or not cpuinfo.exists() or " avx_vnni " not in cpuinfo.read_text():
        pytest.skip("needs kernels for AVX2, and Linux on a processor with AVX-VNNI")
    kernels, stored = Kernels("avx2"), make(kind, 100, 520)
    largest, sign = (7, 8) if stored.kind.element is Element.E2M1 else (126, 128)
    stored.codes[0], stored.codes[1] = largest, largest | sign
    packed = kernels.pack(stored)
    for m in NUMBERS_OF_ROWS:
        x = inputs(m, 520)
        x[0], x[1] = 1, -1  # with rows 0 and 1 of the weight the largest sums that there are
        fast, plain = (kernels.linear(x, packed, int8_inputs=each) for each in (1, CONSTANTS["INT8_WITHOUT_AVX_VNNI"]))
        assert torch.equal(bits(fast), bits(plain))


@pytest.mark.parametrize("kind", ["fp8-tensor", "fp8-block-128", "mxfp8"])
def test_every_code_of_e4m3_next_to_every_largest_exponent(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 256, 256)
    codes = finite_codes(E4M3)
    for row in range(256):  # each group has a largest exponent of its own; subnormal numbers and zeros alone too
        for begin in range(0, 256, GROUP):
            largest = min(8 * ((row + begin // GROUP) % 17), 126)
            pool = codes[(codes & 127) <= largest]
            drawn = torch.randint(len(pool), (GROUP,), generator=torch.Generator().manual_seed(row * 256 + begin))
            stored.codes[row, begin : begin + GROUP] = pool[drawn]
    check(kernels, kernels.pack(stored), rounded(stored, kernels), inputs(16, 256))


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("apart", [1, 3, 6, 7, 8, 9, 15, 16, 17, 40])
def test_scales_of_a_group_may_lie_apart(kernels: Kernels, kind: str, apart: int) -> None:
    stored = make(kind, 64, 256)
    assert stored.scales is not None
    stored.scales[:, 0::2] = 120
    stored.scales[:, 1::2] = 120 - apart
    stored.scales[10:20, 2:4] -= 60
    check(kernels, kernels.pack(stored), rounded(stored, kernels), inputs(16, 256))


def test_every_scale_of_nvfp4(kernels: Kernels) -> None:
    stored = make("nvfp4", 512, 256)
    assert stored.scales is not None
    random = torch.Generator().manual_seed(3)
    for row in range(512):
        largest = max(row % 127, 1)
        stored.scales[row] = torch.randint(0, largest + 1, (16,), generator=random, dtype=torch.uint8)
    stored.scales[5, 3] |= 128  # no quantizer makes a negative scale, but a file may have one
    check(kernels, kernels.pack(stored), rounded(stored, kernels), inputs(16, 256))


@quantized
def test_blocks_and_rows_of_zeros(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 70, 256)
    stored.codes[3] = 0
    stored.codes[4, :GROUP] = 0
    stored.codes[5, 32:64] = 0
    stored.codes[6, 16:32] = 0
    stored.codes[7, 1:GROUP] = 0
    if stored.kind.grid is Grid.E8M0 and stored.scales is not None:
        stored.scales[:, 1] += 9  # a large scale of a block of zeros counts for nothing
    packed = kernels.pack(stored)
    check(kernels, packed, rounded(stored, kernels), inputs(16, 256))
    bias = inputs(1, 70)[0]
    zeros = kernels.linear(torch.zeros(16, 256), packed, bias, int8_inputs=True)
    assert torch.equal(zeros, bias.expand(16, -1))


@quantized
@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_nan_or_inf_is_not_finite_and_others_are(kernels: Kernels, kind: str, special: float) -> None:
    packed = kernels.pack(make(kind, 70, 200))
    for m, dtype in itertools.product((2, 12, 30), DTYPES):
        x = inputs(m, 200).to(dtype)
        x[m // 2, 137] = special
        result = kernels.linear(x, packed, int8_inputs=True)
        others = torch.arange(m) != m // 2
        assert not result[m // 2].isfinite().any()
        assert result[others].isfinite().all()
        if kernels.rounds_inputs(packed, x):
            assert result[m // 2].isnan().all()


@quantized
def test_a_nan_in_the_weight_makes_its_row_nan(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 70, 200)
    if stored.kind.element is Element.E4M3:
        stored.codes[9, 100] = 127
    else:
        assert stored.scales is not None
        stored.scales[9, 2] = 255 if stored.kind.grid is Grid.E8M0 else 127
    result = kernels.linear(inputs(20, 200), kernels.pack(stored), int8_inputs=True)
    assert result[:, 9].isnan().all()
    assert result[:, torch.arange(70) != 9].isfinite().all()


@quantized
def test_an_outlier_costs_accuracy_in_its_group_alone(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 70, 256)
    packed, weight = kernels.pack(stored), rounded(stored, kernels)
    x = inputs(20, 256)
    x[:, 70] = 1e4
    check(kernels, packed, weight, x)
    kept = torch.ones(256, dtype=torch.bool)
    kept[GROUP : 2 * GROUP] = False
    error = rounded_inputs(x)[:, kept] - x[:, kept].double()
    assert error.abs().max() < 4.5 / 127


@quantized
def test_tiny_and_huge_inputs(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 70, 200)
    packed, weight = kernels.pack(stored), rounded(stored, kernels)
    for factor in (1e-42, 1e-36, 1e-30, 1e30):
        check(kernels, packed, weight, inputs(16, 200) * factor)


@kinds
def test_one_row_and_packed_bf16_are_not_rounded(kernels: Kernels, kind: str) -> None:
    packed = kernels.pack(make(kind, 70, 200))
    x = inputs(100, 200).bfloat16()
    assert not kernels.rounds_inputs(packed, x[:1])
    assert rounds(kernels, kind) == (
        kernels.library.isa in int8.ISAS and kind not in (*_FLOAT_KINDS, "fp8-group-32", "fp8-block-48x96")
    )
    for rows in (x[:1], x):
        if not kernels.rounds_inputs(packed, rows):
            result = kernels.linear(rows, packed, int8_inputs=True)
            assert torch.equal(bits(result), bits(kernels.linear(rows, packed)))


@quantized
def test_experts_give_the_bits_of_a_linear(kernels: Kernels, kind: str) -> None:
    counts = (0, 1, 5, 17, 40)
    experts = [kernels.pack(make(kind, 70, 200, seed)) for seed in range(len(counts))]
    x = inputs(sum(counts), 200).bfloat16()
    parts = [
        kernels.linear(rows, expert, int8_inputs=True)
        for rows, expert in zip(x.split(counts), experts, strict=True)
        if len(rows)
    ]
    assert torch.equal(bits(kernels.moe(x, experts, counts, int8_inputs=True)), bits(torch.cat(parts)))


@pytest.mark.parametrize("scheme", COSTS)
def test_the_reference_rounds_like_the_kernel_and_rounding_costs_little(kernels: Kernels, scheme: str) -> None:
    weight = quantize_tensor(inputs(200, 512) * 0.02, SCHEMES[scheme].weight)
    x = inputs(40, 512, seed=2)
    exact = product(x, weight.dequantize().double())
    with native.using(kernels.library.isa):
        expected = linear(x, weight, int8_inputs=True)
        cost = float((expected.double() - exact).norm() / exact.norm())
        words = kernels.library.isa == "avx2" and SCHEMES[scheme].weight.element is E4M3
        assert (2e-4 if words else 1e-3) < cost < (5e-4 if words else COSTS[scheme])
        packed = pack(weight)
        result = linear(x, packed, int8_inputs=True)
        (fused, _) = linear_fused(x, [packed, packed], int8_inputs=True)
        traced = torch.ops.minifloat.linear(x, [packed.data], [], [200], True)
        torch.testing.assert_close(linear(x, packed, impl="reference", int8_inputs=True), expected)
        if int8.rounds(packed, 40, torch.float32):
            assert int8.why_not(packed) == ""
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
        else:
            assert f"this process uses {kernels.library.isa}" in int8.why_not(packed)
            assert torch.equal(result, linear(x, packed))
        assert torch.equal(fused, result)
        assert torch.equal(traced, result)


def test_the_reference_makes_a_group_with_inf_nan() -> None:
    x = torch.ones(2, 130)
    x[1, 70] = torch.inf
    rounded = int8.round_inputs(x)
    assert torch.equal(rounded[0], x[0])
    assert rounded[1, 64:128].isnan().all()
    assert rounded[1, :64].isfinite().all()


def test_why_not_names_the_weight_s_own_reason() -> None:
    if native.load() is None or int8.why_not():
        pytest.skip(int8.why_not())
    assert "bfloat16" in int8.why_not(pack(torch.zeros(32, 64, dtype=torch.bfloat16)))


def test_int8_inputs_exclude_an_activation() -> None:
    weight = quantize_tensor(inputs(32, 64), SCHEMES["fp8"].weight)
    activation = SCHEMES["fp8-dynamic"].activation
    assert isinstance(activation, ActivationSpec)
    with pytest.raises(ValueError, match="exclude each other"):
        linear(inputs(2, 64), weight, activation=activation, int8_inputs=True)
    with pytest.raises(KernelUnavailable, match="pack this one"):
        linear(inputs(2, 64), weight, impl="cpu", int8_inputs=True)


def test_a_decoder_rounds_as_its_reference(kernels: Kernels) -> None:
    shape = Shape(heads=8, kv_heads=2, head_dim=64)
    plain = random_decoder(shape, torch.float32, scheme="mxfp4")
    decoder = dataclasses.replace(plain, int8_inputs=True)
    with native.using(kernels.library.isa):
        logits, reference, unrounded = (
            Session.start(each, impl).run({"a": prompt(20)})["a"]
            for each, impl in ((decoder, "cpu"), (decoder, "reference"), (plain, "cpu"))
        )
        rounds = int8.why_not() == ""

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        """The median over tokens: of a few an input lies next to a tie, and rounds the other way."""
        return float(((one - other).norm(dim=1) / other.norm(dim=1)).median())

    assert distance(unrounded, reference) > 1e-2
    assert distance(logits, reference if rounds else unrounded) < 1e-5
