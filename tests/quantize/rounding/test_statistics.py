"""The products that `Accumulator` adds up chunk by chunk against float64; the rows that `Sample` keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minifloat.quantize.rounding.statistics import CHUNK_ROWS, RESIDUAL_SHARE, Accumulator, Rows, Sample, Statistics

#: A bound of the relative error of one float32 operation, and of one rounding to BF16.
_FLOAT32, _BF16 = 2.0**-24, 2.0**-8


def make_rows(tokens: int, width: int = 40, hidden: int = 24, dtype: torch.dtype = torch.bfloat16) -> Rows:
    generator = torch.Generator().manual_seed(tokens)
    reference = torch.randn(tokens, width, generator=generator)
    inputs = reference + 0.1 * torch.randn(tokens, width, generator=generator)
    residual = torch.randn(tokens, hidden, generator=generator)
    return Rows(inputs.to(dtype), reference.to(dtype), residual)


def accumulate(rows: Rows, lengths: list[int], adding: Tensor | None = None) -> Statistics:
    """Add the rows in parts of the given lengths, over and over."""
    accumulator = Accumulator(rows.inputs.shape[1], drift=True, adding=adding)
    first, part = 0, 0
    while first < len(rows.inputs):
        length = lengths[part % len(lengths)]
        accumulator.add(rows.pick(slice(first, first + length)))
        first, part = first + length, part + 1
    return accumulator.finish()


def assert_product(found: Tensor, left: Tensor, right: Tensor, rounded_inputs: float = 0.0) -> None:
    """Assert that ``left' right / tokens`` is found within the bound of sums of float32."""
    left, right, tokens = left.double(), right.double(), len(left)
    bound = ((tokens + 3) * _FLOAT32 + rounded_inputs) * (left.abs().T @ right.abs()) / tokens
    assert ((found.double() - left.T @ right / tokens).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [[1 << 20], [256], [1000, 1, 37, 3000]])
def test_means_of_products_are_those_of_float64_however_the_text_is_cut(lengths: list[int], dtype: torch.dtype) -> None:
    rows = make_rows(CHUNK_ROWS + 1234, dtype=dtype)
    found = accumulate(rows, lengths)
    rounded = _BF16 if dtype is torch.bfloat16 else 2 * _FLOAT32
    assert found.tokens == CHUNK_ROWS + 1234
    assert_product(found.hessian, rows.inputs, rows.inputs)
    assert found.drift is not None
    assert found.output_drift is None
    drift = rows.reference.double() - rows.inputs.double()
    assert_product(found.drift, drift, rows.inputs, rounded)
    assert torch.equal(found.hessian, found.hessian.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_linear_that_adds_to_the_residual_stream_has_the_drift_of_its_outputs(dtype: torch.dtype) -> None:
    rows = make_rows(CHUNK_ROWS + 1234, dtype=dtype)
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = accumulate(rows, [1000, 37], weight)
    assert rows.residual is not None
    assert found.drift is None
    assert found.output_drift is not None
    drift = rows.reference.double() - rows.inputs.double()
    expected = drift @ weight.double().T + RESIDUAL_SHARE * rows.residual.double()
    rounded = 4 * _BF16 if dtype is torch.bfloat16 else 50 * _FLOAT32
    assert_product(found.output_drift, expected, rows.inputs, rounded)


def test_one_and_two_threads_give_the_same_bits() -> None:
    rows, adding = make_rows(CHUNK_ROWS + 1234, width=130), torch.ones(24, 130, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append((accumulate(rows, [700]), accumulate(rows, [700], adding)))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one.hessian, two.hessian)
        for first, second in ((one.drift, two.drift), (one.output_drift, two.output_drift)):
            assert (first is None) == (second is None)
            assert first is None or second is None or torch.equal(first, second)


def test_without_tokens_all_means_are_zero() -> None:
    statistics = Accumulator(8, drift=True).finish()
    assert statistics.tokens == 0
    assert torch.equal(statistics.hessian, torch.zeros(8, 8))
    assert statistics.drift is not None
    assert not statistics.drift.any()


def test_statistics_that_were_not_asked_for_are_none() -> None:
    accumulator = Accumulator(40)
    accumulator.add(make_rows(10))
    statistics = accumulator.finish()
    assert statistics.drift is None
    assert statistics.output_drift is None


@pytest.mark.parametrize("lengths", [[100] * 4, [7, 300, 1, 64], [3, 3, 3, 3]])
def test_a_sample_keeps_rows_of_every_part_spread_evenly_and_no_more_than_its_limit(lengths: list[int]) -> None:
    sample = Sample(64, len(lengths))
    for number, length in enumerate(lengths):
        values = torch.full((length, 2), float(number), dtype=torch.bfloat16)
        values[:, 1] = torch.arange(length)
        sample.add(Rows(values, values))
    rows = sample.rows()
    assert rows is not None
    assert rows.inputs.dtype == torch.float32
    assert len(rows.inputs) <= 64
    for number, length in enumerate(lengths):
        positions = rows.inputs[rows.inputs[:, 0] == number, 1]
        assert len(positions) >= min(length, 16) // 2
        assert positions.max() >= length / 2 or length < 4


def test_a_sample_without_rows_is_none() -> None:
    sample = Sample(64, 3)
    sample.add(make_rows(0))
    assert sample.rows() is None
