"""The native `round_inputs` below the public API: every instruction set against plain torch, bit for bit."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPES, Kernels, bits, flushing_subnormals, inputs
from quantize_cases import every_binade, sixteen_bit_values, ties_and_neighbours

from minifloat.kernels.inputs import round_inputs
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import GROUP_16, GROUP_32, GROUP_128, TENSOR, TOKEN, block_granularity
from minifloat.numerics.scheme import ActivationSpec

STATIC = ActivationSpec(E4M3, TENSOR, dynamic=False)
DYNAMIC = {
    granularity.name: ActivationSpec(E4M3, granularity, dynamic=True)
    for granularity in (
        TENSOR,
        TOKEN,
        GROUP_128,
        GROUP_32,
        GROUP_16,
        block_granularity(1, 7),
        block_granularity(1, 1500),
    )
}
#: Around the widths of vectors (4 to 16), groups (128) and the kernel's chunks (1024).
SHAPES = ((1, 1), (300, 1), (1, 16), (2, 15), (3, 17), (5, 100), (3, 127), (4, 128), (2, 129), (2, 1025), (33, 300))
SHAPES += ((3, 2050), (2, 3001))
#: What one code is worth: ordinary, powers of two, at both ends of float32, and subnormal.
SCALES = (1.0, 0.0123, 1 / 3, 2.0**-9, 1e30, 3e38, 2.0**-126, 1e-40)

dynamic_specs = pytest.mark.parametrize("spec", DYNAMIC.values(), ids=DYNAMIC)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits, flushing_subnormals, signs of zeros included; any NaN for a NaN."""
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    assert torch.equal(bits(actual)[~nan], bits(expected)[~nan])


def check(
    kernels: Kernels, x: torch.Tensor, spec: ActivationSpec, scale: float | None = None, threads: int = 1
) -> torch.Tensor:
    given = None if scale is None else torch.tensor(scale)
    actual = kernels.round_inputs(x, spec, given, threads)
    assert_same(actual, round_inputs(x, spec, given, impl="reference"))
    return actual


@dynamic_specs
@dtypes
def test_ragged_shapes_with_scales_of_their_own(kernels: Kernels, spec: ActivationSpec, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        check(kernels, inputs(*shape, dtype, seed), spec)


@dtypes
def test_ragged_shapes_with_a_given_scale(kernels: Kernels, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        check(kernels, inputs(*shape, dtype, seed), STATIC, 0.0071)  # some of them are clamped


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_under_a_given_scale(kernels: Kernels, dtype: torch.dtype, scale: float) -> None:
    check(kernels, torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(64, 1024), STATIC, scale)


@pytest.mark.parametrize("scale", SCALES)
def test_float32_of_every_binade_under_a_given_scale(kernels: Kernels, scale: float) -> None:
    for order in every_binade(70, 513):
        check(kernels, order, STATIC, scale)


@dynamic_specs
@dtypes
def test_every_magnitude_in_one_block_and_in_blocks_of_its_own(
    kernels: Kernels, spec: ActivationSpec, dtype: torch.dtype
) -> None:
    for order in every_binade(256, 256) if dtype is torch.float32 else sixteen_bit_values(dtype):
        check(kernels, order, spec)


@dynamic_specs
@dtypes
def test_blocks_with_nan_or_inf_among_others(kernels: Kernels, spec: ActivationSpec, dtype: torch.dtype) -> None:
    for special in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        for position in (0, 77, 128, 299):
            x = inputs(4, 300, dtype)
            x[2, position] = special
            result = check(kernels, x, spec)
            assert result[2, position].isnan()
            cols = spec.granularity.cols or 300
            block = slice(position // cols * cols, (position // cols + 1) * cols)
            assert result[2, block].isnan().all()
            if spec.granularity.rows == 1:
                assert int(result.isnan().sum()) == len(range(300)[block])


@dtypes
def test_a_given_scale_clamps_inf_and_keeps_nan(kernels: Kernels, dtype: torch.dtype) -> None:
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0, -0.0]], dtype=dtype)
    result = check(kernels, x, STATIC, 0.5)
    assert result[0, :2].tolist() == [E4M3.max / 2, -E4M3.max / 2]
    assert result[0, 2].isnan()
    assert result[0, 3] == 1.0


@dynamic_specs
@dtypes
def test_zeros_keep_their_sign_and_the_smallest_numbers_do_not_divide_by_zero(
    kernels: Kernels, spec: ActivationSpec, dtype: torch.dtype
) -> None:
    x = torch.zeros(4, 300, dtype=dtype)
    x[1] = -0.0
    x[2] = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x[3, 10] = -torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert check(kernels, x, spec).isfinite().all()
    assert not check(kernels, x[:2], spec).any()


@pytest.mark.parametrize("scale", [1.0, 0.75, 1 / 3])
def test_ties_and_their_neighbours(kernels: Kernels, scale: float) -> None:
    check(kernels, ties_and_neighbours(E4M3, scale), STATIC, scale)


@dtypes
def test_rows_may_have_a_stride_and_odd_addresses(kernels: Kernels, dtype: torch.dtype) -> None:
    wide = torch.full((5, 401), torch.nan, dtype=dtype)
    for offset in (1, 3):
        x = wide[:, offset : offset + 300]
        x.copy_(inputs(5, 300, dtype))
        for spec in DYNAMIC.values():
            check(kernels, x, spec)
        check(kernels, x, STATIC, 0.01)
        wide.fill_(torch.nan)


@pytest.mark.parametrize("threads", [0, 1, 2, 3, 5, 1000])
def test_the_number_of_threads_changes_no_bit(kernels: Kernels, threads: int) -> None:
    x = inputs(501, 700, torch.bfloat16)
    x[500, 699] = 100.0  # the amax of the tensor is in the last row
    for spec in DYNAMIC.values():
        check(kernels, x, spec, threads=threads)
    check(kernels, x, STATIC, 0.01, threads=threads)


@dtypes
@pytest.mark.parametrize("threads", [1, 3])
def test_the_floating_point_mode_of_the_caller_changes_no_bit(
    kernels: Kernels, dtype: torch.dtype, threads: int
) -> None:
    tiny = torch.finfo(torch.float16 if dtype is torch.float16 else torch.float32).smallest_normal
    x = (inputs(200, 700) * tiny).to(dtype)
    cases: list[tuple[ActivationSpec, torch.Tensor | None]] = [(spec, None) for spec in DYNAMIC.values()]
    cases += [(STATIC, torch.tensor(tiny / 64))]
    expected = [round_inputs(x, *case, impl="reference") for case in cases]
    with flushing_subnormals():
        results = [kernels.round_inputs(x, *case, threads) for case in cases]
    for actual, wanted in zip(results, expected, strict=True):
        assert_same(actual, wanted)


def test_zero_rows_give_an_empty_result(kernels: Kernels) -> None:
    for spec in DYNAMIC.values():
        assert kernels.round_inputs(torch.empty(0, 5), spec).shape == (0, 5)


@pytest.mark.parametrize(("field", "value"), [("cols", 0), ("rows", -1), ("dtype", 3), ("scaling", 3), ("scaling", 0)])
def test_the_library_refuses_what_would_leave_its_memory(kernels: Kernels, field: str, value: int) -> None:
    from minifloat.kernels.native import STRUCTS

    args = STRUCTS["round_inputs_args"](
        rows=1, cols=1, block_cols=1, scaling=2, element=STRUCTS["format"](8, 3, -6, E4M3.max)
    )
    setattr(args, field, value)
    with pytest.raises(ValueError, match="refused"):
        kernels.library.call("round_inputs", args)
