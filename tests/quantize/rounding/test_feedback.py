"""`factorize` and `regress` against float64 formulas written down here; damping, dead columns, and what is refused."""

from __future__ import annotations

import pytest
import torch
from rounding_cases import correlated_inputs, hessian_of
from torch import Tensor

from minifloat.errors import SingularHessianError
from minifloat.kernels.rounding import ROW_BLOCK, round_with_feedback
from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import E2M1
from minifloat.quantize.rounding.feedback import DAMPING, ROW_DAMPING, factorize, factorize_rows, regress


def unit_upper_factor(matrix: Tensor) -> Tensor:
    """U + I of ``matrix = (U + I) D (U + I)'``, float64, by elimination from the last column to the first."""
    rest, factor = matrix.double().clone(), torch.eye(len(matrix), dtype=torch.float64)
    for j in range(len(matrix) - 1, -1, -1):
        factor[:j, j] = rest[:j, j] / rest[j, j]
        rest[:j, :j] -= rest[j, j] * torch.outer(factor[:j, j], factor[:j, j])
    return factor


@pytest.mark.parametrize("width", [1, 2, 33, 100])
def test_the_feedback_is_the_unit_upper_factor_of_the_ordered_and_damped_hessian(width: int) -> None:
    hessian = hessian_of(correlated_inputs(4 * width, width))
    feedback = factorize(hessian, "q_proj")
    damped = hessian.double() + DAMPING * hessian.double().diagonal().mean() * torch.eye(width)
    expected = unit_upper_factor(damped[feedback.order][:, feedback.order])
    torch.testing.assert_close(feedback.matrix, (expected - torch.eye(width)).float(), rtol=1e-6, atol=1e-7)
    assert torch.equal(feedback.matrix, feedback.matrix.triu(1))
    assert (feedback.damping, feedback.dead) == (DAMPING, 0)


def test_columns_are_ordered_by_falling_diagonal_and_equal_ones_keep_their_order() -> None:
    feedback = factorize(torch.diag(torch.tensor([1.0, 3.0, 2.0, 3.0, 1.0, 0.0])), "q_proj")
    assert feedback.order.tolist() == [1, 3, 2, 0, 4, 5]


def test_columns_whose_input_is_always_zero_come_last_and_exchange_no_error() -> None:
    inputs = correlated_inputs(500, 40)
    inputs[:, [3, 17, 30]] = 0.0
    feedback = factorize(hessian_of(inputs), "q_proj")
    assert feedback.dead == 3
    assert feedback.order[-3:].tolist() == [3, 17, 30]
    assert not feedback.matrix[-3:].any()
    assert not feedback.matrix[:, -3:].any()
    assert feedback.matrix[:-3].any()


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**20])
def test_the_feedback_does_not_depend_on_the_unit_of_the_inputs(factor: float) -> None:
    inputs = correlated_inputs(500, 40)
    inputs[:, [3, 17, 30]] = 0.0
    hessian = hessian_of(inputs)
    assert torch.equal(factorize(hessian, "q_proj").matrix, factorize(hessian * factor, "q_proj").matrix)


def test_a_hessian_of_zeros_feeds_nothing_back() -> None:
    feedback = factorize(torch.zeros(5, 5), "q_proj")
    assert feedback.order.tolist() == list(range(5))
    assert not feedback.matrix.any()
    assert feedback.dead == 5


def test_a_hessian_of_fewer_tokens_than_columns_needs_no_more_than_the_usual_damping() -> None:
    feedback = factorize(hessian_of(correlated_inputs(5, 64)), "q_proj")
    assert feedback.damping == DAMPING
    assert feedback.matrix.isfinite().all()


@pytest.mark.parametrize(("smallest", "damping"), [(-0.05, 0.1), (-0.5, 1.0), (-5.0, 10.0)])
def test_the_damping_grows_until_the_hessian_is_positive_definite(smallest: float, damping: float) -> None:
    signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], dtype=torch.float64)
    eigenvalues = torch.tensor([2.0 - smallest, 1.0, 1.0, smallest], dtype=torch.float64)
    hessian = signs @ eigenvalues.diag() @ signs / 4  # its diagonal is 1
    feedback = factorize(hessian.float(), "q_proj")
    assert feedback.damping == pytest.approx(damping)
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(4)
    expected = unit_upper_factor(damped[feedback.order][:, feedback.order]) - torch.eye(4)
    torch.testing.assert_close(feedback.matrix, expected.float(), rtol=1e-4, atol=1e-5)


def test_a_hessian_that_no_damping_makes_positive_definite_is_refused_by_name() -> None:
    hessian = torch.tensor([[1.0, 100.0], [100.0, 1.0]])
    with pytest.raises(SingularHessianError, match=r"^layers\.7\.q_proj: .*not positive definite.*10 of the mean"):
        factorize(hessian, "layers.7.q_proj")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_hessian_with_nan_or_inf_is_refused_by_name(value: float) -> None:
    hessian = torch.eye(4)
    hessian[2, 2] = value
    with pytest.raises(SingularHessianError, match=r"^layers\.7\.q_proj: .* NaN or Inf"):
        factorize(hessian, "layers.7.q_proj")


def test_regress_is_the_ridge_regression_in_float64() -> None:
    inputs, outputs = correlated_inputs(300, 48).double(), torch.randn(300, 7, dtype=torch.float64)
    hessian = inputs.T @ inputs / 300
    ridge = (DAMPING * hessian.diagonal().mean()).sqrt()
    rows = torch.cat([inputs / 300**0.5, ridge * torch.eye(48)])
    expected = torch.linalg.lstsq(rows, torch.cat([outputs / 300**0.5, torch.zeros(48, 7)])).solution.T
    found = regress((outputs.T @ inputs / 300).float(), factorize(hessian.float(), "q_proj"))
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)


def test_regress_on_inputs_that_are_always_zero_is_zero() -> None:
    assert not regress(torch.zeros(3, 4), factorize(torch.zeros(4, 4), "q_proj")).any()


def blocks_of(moments: Tensor) -> Tensor:
    """The blocks on the diagonal of ``[N, N]``, padded with zeros."""
    blocks = torch.zeros(-(-len(moments) // ROW_BLOCK), ROW_BLOCK, ROW_BLOCK)
    for number, block in enumerate(blocks):
        part = moments[number * ROW_BLOCK :, number * ROW_BLOCK :][:ROW_BLOCK, :ROW_BLOCK]
        block[: len(part), : len(part)] = part
    return blocks


@pytest.mark.parametrize("rows", [1, 30, ROW_BLOCK, ROW_BLOCK + 1, 2 * ROW_BLOCK + 40])
def test_the_feedback_between_rows_is_the_unit_upper_factor_of_each_block(rows: int) -> None:
    moments = hessian_of(correlated_inputs(4 * rows, rows))
    feedback = factorize_rows(blocks_of(moments), rows)
    assert feedback.order.sort().values.tolist() == list(range(rows))
    for number, block in enumerate(blocks_of(moments)):
        order = feedback.order[number * ROW_BLOCK : (number + 1) * ROW_BLOCK] - number * ROW_BLOCK
        damped = block.double() + ROW_DAMPING * block.double().diagonal().mean() * torch.eye(ROW_BLOCK)
        expected = unit_upper_factor(damped[order][:, order]) - torch.eye(len(order))
        actual = feedback.matrix[number * ROW_BLOCK : (number + 1) * ROW_BLOCK]
        torch.testing.assert_close(actual[:, : len(order)], expected.float(), rtol=1e-5, atol=1e-6)
        assert not actual[:, len(order) :].any()


def test_rows_without_gradients_exchange_no_errors() -> None:
    assert not factorize_rows(torch.zeros(2, ROW_BLOCK, ROW_BLOCK), 100).matrix.any()
    moments = hessian_of(correlated_inputs(500, 40))
    moments[[3, 17]] = 0.0
    moments[:, [3, 17]] = 0.0
    feedback = factorize_rows(blocks_of(moments), 40)
    assert feedback.order[-2:].tolist() == [3, 17]
    assert not feedback.matrix[-2:].any()


def test_rounding_follows_the_formula_of_yaqa_and_lowers_the_error_that_both_sides_weigh() -> None:
    """Q = round(W + A'E + E B + A'E B) with E = W - Q, element by element in float64 (arXiv 2505.22988, section 3)."""
    rows, cols = 24, 40
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(3))
    inputs, outputs = hessian_of(correlated_inputs(300, cols, 4)), hessian_of(correlated_inputs(300, rows, 5))
    columns, between = factorize(inputs, "q_proj"), factorize_rows(blocks_of(outputs), rows)
    ordered = weight[between.order][:, columns.order]
    scale = 0.4
    a, b = between.matrix[:, :rows].double(), columns.matrix.double()
    quantized = torch.zeros(rows, cols, dtype=torch.float64)
    for j in range(cols):
        for i in range(rows):
            error = ordered.double() - quantized
            error[i:, j] = 0.0
            error[:, j + 1 :] = 0.0
            moved = (
                ordered[i, j]
                + error[i] @ b[:, j]
                + a[:, i] @ (error[:, j] + error @ b[:, j]).where(torch.arange(rows) < i, torch.tensor(0.0))
            )
            quantized[i, j] = decode(encode((moved / scale).float()[None], E2M1), E2M1)[0].double() * scale
    scales, groups = torch.full((rows, 1), scale), torch.zeros(cols, dtype=torch.int32)

    def rounded(row_feedback: Tensor | None) -> Tensor:
        codes = round_with_feedback(ordered.contiguous(), scales, groups, columns.matrix, E2M1, row_feedback)
        return decode(codes, E2M1) * scale

    assert float((rounded(between.matrix) - quantized).abs().max()) < 1e-6
    weighed = outputs[between.order][:, between.order], inputs[columns.order][:, columns.order]

    def loss(values: Tensor) -> float:
        error = ordered - values
        return float((weighed[0] @ error @ weighed[1] * error).sum())

    assert loss(rounded(between.matrix)) < 0.7 * loss(rounded(None))
