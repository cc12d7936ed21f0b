"""`moe_linear` and `sort_by_expert`: against float64 and the reference on ragged groups, and refused arguments."""

from __future__ import annotations

import pytest
import torch

from minifloat.errors import ShapeError, UnknownNameError, UnsupportedTensorError
from minifloat.kernels import native
from minifloat.kernels.linear import linear
from minifloat.kernels.moe import PackedExperts, moe_linear, sort_by_expert
from minifloat.kernels.pack import PackedWeight, pack
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import quantize_tensor

FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
FORMATS = [*FLOATS, "fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4"]
IMPLS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(native.load() is None, reason="no library"))]
ROWS, COLS = 70, 160
#: Experts without tokens, with one and with many; first, last, and all of them without.
COUNTS = [(0, 1, 0, 9, 40, 2, 0), (3,), (0, 0), (70, 0, 1), (1,) * 20]


def expert(fmt: str, seed: int, rows: int = ROWS, cols: int = COLS) -> PackedWeight:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return pack(weight.to(FLOATS[fmt]) if fmt in FLOATS else quantize_tensor(weight, SCHEMES[fmt].weight))


def experts(fmt: str, count: int) -> PackedExperts:
    return PackedExperts([expert(fmt, seed) for seed in range(count)])


def offsets_of(counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *counts)).cumsum(0)


def inputs(rows: int, dtype: torch.dtype, cols: int = COLS) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(9)).to(dtype)


def exact(
    x: torch.Tensor,
    weights: PackedExperts,
    counts: tuple[int, ...],
    x_rows: torch.Tensor | None,
    biases: torch.Tensor | None,
) -> torch.Tensor:
    owners = [e for e, count in enumerate(counts) for _ in range(count)]
    rows = range(len(owners)) if x_rows is None else x_rows.tolist()
    values = [weight.dequantize().double() for weight in weights]
    products = [
        values[e] @ x[row].double() + (0 if biases is None else biases[e].double())
        for e, row in zip(owners, rows, strict=True)
    ]
    return torch.stack(products) if products else torch.empty(0, ROWS, dtype=torch.float64)


def poison() -> None:
    """Leave NaN where torch's allocator will put the next results."""
    blocks = [torch.full((size,), torch.nan) for size in (ROWS, 10 * ROWS, 60 * ROWS, 100 * ROWS) for _ in range(4)]
    del blocks


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", FORMATS)
def test_ragged_groups_give_what_float64_gives(fmt: str, dtype: torch.dtype, impl: str) -> None:
    if impl == "reference" and dtype != torch.float32 and fmt != "bf16":
        bound = 6e-3  # the reference rounds weights to 16 bits, and with them the products
    else:
        bound = 1e-5 if dtype == torch.float32 else 2e-3
    for counts in COUNTS[:1] if impl == "reference" else COUNTS:
        weights, total = experts(fmt, len(counts)), sum(counts)
        biases = inputs(len(counts), torch.float32, ROWS)
        x_rows = torch.randint(30, (total,), generator=torch.Generator().manual_seed(1))
        for x, rows, bias in ((inputs(total, dtype), None, None), (inputs(30, dtype), x_rows, biases)):
            expected = exact(x, weights, counts, rows, bias)
            poison()
            if impl == "reference" and bias is not None:
                bias = bias.to(dtype)
                expected = exact(x, weights, counts, rows, bias)
            found = moe_linear(x, weights, offsets_of(counts), rows, bias, impl=impl)
            assert found.dtype == dtype
            assert found.shape == (total, ROWS)
            assert (found.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.skipif(native.load() is None, reason="no library")
def test_more_tokens_than_one_wave_takes_give_the_same_bits() -> None:
    weights = [expert("fp8", seed, 32, 2048) for seed in range(4)]
    x = inputs(500, torch.float32, 2048)
    counts = (1500, 2000, 0, 900)  # 16 MiB hold 2048 rows of 2048 float32
    x_rows = torch.randint(500, (sum(counts),), generator=torch.Generator().manual_seed(2))
    found = moe_linear(x, weights, offsets_of(counts), x_rows)
    parts = x_rows.split(counts)
    assert torch.equal(found, torch.cat([linear(x[rows], weights[e]) for e, rows in enumerate(parts) if len(rows)]))


def test_an_input_with_strides_is_read_where_it_lies() -> None:
    wide, weights = torch.full((9, 2 * COLS), torch.nan), experts("fp8", 2)
    wide[:, ::2] = inputs(9, torch.float32)
    offsets = offsets_of((4, 5))
    assert torch.equal(
        moe_linear(wide[:, ::2], weights, offsets), moe_linear(inputs(9, torch.float32), weights, offsets)
    )


def test_tokens_are_sorted_by_expert_in_their_order() -> None:
    ids = torch.tensor([[2, 0], [2, 3], [0, 2]])
    offsets, x_rows, order = sort_by_expert(ids, 5)
    assert offsets.tolist() == [0, 2, 2, 5, 6, 6]
    assert x_rows.tolist() == [0, 2, 0, 1, 2, 1]
    assert ids.flatten()[order].tolist() == [0, 0, 2, 2, 2, 3]
    assert order.tolist() == [1, 4, 0, 2, 5, 3]


def test_no_tokens_sort_into_empty_groups() -> None:
    offsets, x_rows, order = sort_by_expert(torch.empty(0, 2, dtype=torch.int64), 3)
    assert offsets.tolist() == [0, 0, 0, 0]
    assert x_rows.numel() == order.numel() == 0
    assert moe_linear(torch.empty(0, COLS), experts("fp8", 3), offsets, x_rows).shape == (0, ROWS)


BAD_GROUPS = {
    "fewer offsets than experts": ([0, 2], None, "offsets: expected 3 numbers"),
    "offsets that fall": ([0, 3, 2], [0, 1], "do not fall"),
    "offsets that begin late": ([1, 1, 4], None, "from 0 to 4"),
    "offsets that end early": ([0, 1, 3], None, "from 0 to 4"),
    "offsets past the end": ([0, 1, 5], None, "from 0 to 4"),
    "a negative row": ([0, 1, 2], [0, -1], "rows -1 to 0 of the 4 of x"),
    "a row past the end": ([0, 1, 2], [4, 0], "rows 0 to 4 of the 4 of x"),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("offsets", "x_rows", "message"), BAD_GROUPS.values(), ids=BAD_GROUPS)
def test_groups_that_do_not_fit_are_refused(
    offsets: list[int], x_rows: list[int] | None, message: str, impl: str
) -> None:
    rows = None if x_rows is None else torch.tensor(x_rows)
    with pytest.raises(ShapeError, match=message):
        moe_linear(inputs(4, torch.float32), experts("fp8", 2), torch.tensor(offsets), rows, impl=impl)


def test_tensors_of_another_shape_or_dtype_are_refused() -> None:
    weights, x, offsets = experts("fp8", 2), inputs(2, torch.float32), torch.tensor([0, 1, 2])
    with pytest.raises(ShapeError, match=rf"x: expected \[M, {COLS}\]"):
        moe_linear(x[:, 1:], weights, offsets)
    with pytest.raises(UnsupportedTensorError, match=r"x: .*float64"):
        moe_linear(x.double(), weights, offsets)
    with pytest.raises(UnsupportedTensorError, match="offsets: expected int64"):
        moe_linear(x, weights, offsets.int())
    with pytest.raises(ShapeError, match="offsets: expected one contiguous dimension"):
        moe_linear(x, weights, torch.zeros(6, dtype=torch.int64)[::2])
    with pytest.raises(ShapeError, match=rf"biases: expected \[2, {ROWS}\]"):
        moe_linear(x, weights, offsets, None, torch.zeros(ROWS))
    with pytest.raises(UnsupportedTensorError, match=r"biases: .*float64"):
        moe_linear(x, weights, offsets, None, torch.zeros(2, ROWS).double())
    with pytest.raises(ShapeError, match=r"expected \[T, k\]"):
        sort_by_expert(torch.tensor([1]), 2)
    with pytest.raises(UnsupportedTensorError, match="expected int64"):
        sort_by_expert(torch.tensor([[1.0]]), 2)
    with pytest.raises(ShapeError, match="experts 0 to 1, got -1 to 2"):
        sort_by_expert(torch.tensor([[2, -1]]), 2)


def test_experts_of_several_kinds_are_refused() -> None:
    with pytest.raises(ShapeError, match="at least one"):
        PackedExperts([])
    with pytest.raises(ShapeError, match=r"one shape for all, got \[\(70, 160\), \(71, 160\)\]"):
        PackedExperts([expert("fp8", 0), expert("fp8", 0, 71)])
    with pytest.raises(UnsupportedTensorError, match="several formats"):
        PackedExperts([expert("fp8", 0), expert("mxfp4", 0)])


def test_an_implementation_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="valid: auto, reference, cpu"):
        moe_linear(inputs(1, torch.float32), experts("fp8", 1), torch.tensor([0, 1]), impl="triton")
