"""`cholesky_` and `for_each_tile` with tiles that are smaller than the matrix, against LAPACK in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from minifloat.quantize.rounding import cholesky
from minifloat.quantize.rounding.cholesky import cholesky_, for_each_tile, tiles
from minifloat.quantize.rounding.feedback import factorize, regress


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cholesky, "_TILE", 16)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    known = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(known)


def positive(size: int) -> Tensor:
    rows = torch.randn(2 * size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    return (rows.T @ rows + (rows.T @ rows).T) / (2 * size)


def lower_blocks(matrix: Tensor) -> list[Tensor]:
    return [matrix[rows, : rows.stop].clone() for rows in tiles(len(matrix))]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 48, 75])
def test_the_lower_triangle_is_the_factor_of_lapack(size: int) -> None:
    matrix = positive(size)
    blocks = lower_blocks(matrix)
    assert cholesky_(blocks)
    factor = torch.linalg.cholesky(matrix)
    for rows, block in zip(tiles(size), blocks, strict=True):
        torch.testing.assert_close(block, factor[rows, : rows.stop])


@pytest.mark.parametrize("column", [0, 20, 74])
def test_a_matrix_that_is_not_positive_definite_has_no_factor(column: int) -> None:
    matrix = positive(75)
    matrix[column, column] = -1.0
    assert not cholesky_(lower_blocks(matrix))


def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    hessian, products = positive(75).float(), positive(75)[:40].float()
    feedback = factorize(hessian, "q_proj")
    found = regress(products, feedback)
    torch.set_num_threads(1)
    assert torch.equal(factorize(hessian, "q_proj").matrix, feedback.matrix)
    assert torch.equal(regress(products, feedback), found)


def test_the_feedback_and_the_regression_are_those_of_the_whole_matrix() -> None:
    hessian, products = positive(75), positive(75)[:40]
    feedback = factorize(hessian.float(), "q_proj")
    damped = hessian + feedback.damping * hessian.diagonal().mean() * torch.eye(75)
    upper = feedback.matrix.double() + torch.eye(75)
    torch.testing.assert_close(
        upper * feedback.scale @ upper.T, damped[feedback.order][:, feedback.order], atol=1e-6, rtol=1e-5
    )
    found = regress(products.float(), feedback)
    torch.testing.assert_close(found.double(), products @ torch.linalg.inv(damped), atol=1e-5, rtol=1e-4)


def test_an_error_of_one_tile_is_raised_and_the_threads_are_given_back() -> None:
    known = torch.get_num_threads()

    def fails(part: slice) -> None:
        assert torch.get_num_threads() == 1
        raise ValueError(part.start)

    with pytest.raises(ValueError, match=r"^0$"), for_each_tile() as for_each:
        for_each(fails, tiles(40))
    assert torch.get_num_threads() == known
