"""Tests of blocks and scale grids."""

from __future__ import annotations

import pytest

from minifloat.numerics.granularity import (
    BLOCK_128,
    CHANNEL,
    GROUP_16,
    GROUP_32,
    GROUP_128,
    TENSOR,
    TOKEN,
    Granularity,
)

ALL = (TENSOR, CHANNEL, BLOCK_128, GROUP_128, GROUP_32, GROUP_16, TOKEN)
each_granularity = pytest.mark.parametrize("granularity", ALL, ids=str)


@pytest.mark.parametrize(
    ("granularity", "shape", "grid"),
    [
        (TENSOR, (300, 500), (1, 1)),
        (CHANNEL, (300, 500), (300, 1)),
        (TOKEN, (7, 500), (7, 1)),
        (BLOCK_128, (256, 384), (2, 3)),
        (BLOCK_128, (257, 383), (3, 3)),
        (BLOCK_128, (1, 1), (1, 1)),
        (GROUP_128, (4, 129), (4, 2)),
        (GROUP_32, (4, 64), (4, 2)),
        (GROUP_32, (4, 65), (4, 3)),
        (GROUP_16, (4, 64), (4, 4)),
    ],
    ids=str,
)
def test_the_scale_grid_counts_whole_and_partial_blocks(
    granularity: Granularity, shape: tuple[int, int], grid: tuple[int, int]
) -> None:
    assert granularity.scale_shape(shape) == grid


@pytest.mark.parametrize(
    ("granularity", "block"),
    [
        (TENSOR, (300, 500)),
        (CHANNEL, (1, 500)),
        (BLOCK_128, (128, 128)),
        (GROUP_128, (1, 128)),
        (GROUP_32, (1, 32)),
        (GROUP_16, (1, 16)),
    ],
    ids=str,
)
def test_a_block_without_an_extent_covers_the_whole_matrix(granularity: Granularity, block: tuple[int, int]) -> None:
    assert granularity.block((300, 500)) == block


@each_granularity
def test_a_matrix_without_rows_has_no_blocks(granularity: Granularity) -> None:
    assert granularity.scale_shape((0, 64))[0] == 0
    assert granularity.scale_shape((4, 0))[1] == 0
    assert min(granularity.block((0, 0))) >= 1


def test_the_row_multiple_is_the_number_of_block_rows() -> None:
    assert {g.name: g.row_multiple for g in ALL} == {
        "tensor": None,
        "channel": 1,
        "block 128x128": 128,
        "group 1x128": 1,
        "group 1x32": 1,
        "group 1x16": 1,
        "token": 1,
    }


@each_granularity
def test_a_granularity_prints_as_its_name(granularity: Granularity) -> None:
    assert str(granularity) == granularity.name
