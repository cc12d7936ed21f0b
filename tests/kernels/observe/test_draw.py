"""`draw_rows`: the kernel of each instruction set against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from minifloat.errors import ShapeError
from minifloat.kernels import threads
from minifloat.kernels.draw import draw_rows, invert, weights_of


def logits(rows: int, vocab: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, vocab), np.float32) * 4


def drawn(rows: NDArray[np.float32], temperature: float, uniforms: list[float], impl: str = "cpu") -> list[int]:
    return draw_rows(rows, rows.max(-1).tolist(), [temperature] * len(rows), uniforms, impl=impl)


@pytest.mark.parametrize("vocab", [1, 2, 9, 50, 64, 257, 2049, 49152])
def test_tokens_are_those_of_numpy(kernel: None, vocab: int) -> None:
    rows = logits(40, vocab, vocab)
    for temperature in (0.3, 1.0, 2.0):
        uniforms = np.random.default_rng(3).random(40).tolist()
        assert drawn(rows, temperature, uniforms) == drawn(rows, temperature, uniforms, "reference")


def test_a_token_owns_the_numbers_from_the_sum_before_it_to_its_own(kernel: None) -> None:
    row = np.log(
        np.array([0.25, 0, 0.25, 0.5], np.float32), where=[True, False, True, True], out=np.full(4, -np.inf, "f")
    )
    uniforms = [0.0, 0.2499, 0.2501, 0.4999, 0.5001, 1 - 2**-53]
    assert drawn(np.tile(row, (6, 1)), 1.0, uniforms) == [0, 0, 2, 2, 3, 3]


def test_no_token_of_weight_zero_is_drawn(kernel: None) -> None:
    rows = np.full((2, 3000), -np.inf, np.float32)
    rows[:, 1234] = 5.0
    assert drawn(rows, 1.0, [0.0, 1 - 2**-53]) == [1234, 1234]
    assert drawn(logits(1, 3000, 0), 1e-300, [0.7]) == [int(logits(1, 3000, 0).argmax())]


def test_rows_of_a_wider_array_and_each_number_of_threads_give_the_same(
    kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, uniforms = logits(13, 700, 8), np.random.default_rng(1).random(13).tolist()
    monkeypatch.setattr(threads, "count", lambda: 1)
    alone = drawn(np.ascontiguousarray(wide[:, :500]), 1.0, uniforms)
    monkeypatch.setattr(threads, "count", lambda: 3)
    assert drawn(wide[:, :500], 1.0, uniforms) == alone


def test_frequencies_are_the_probabilities(kernel: None) -> None:
    row, count = logits(1, 6, 2) / 4, 20_000
    found = drawn(np.repeat(row, count, 0), 0.7, np.random.default_rng(5).random(count).tolist())
    weights = weights_of(row[0], row[0].max(), 0.7)
    assert np.bincount(found, minlength=6) / count == pytest.approx(weights / weights.sum(), abs=0.015)
    assert invert(weights, 0.0) == 0


def test_sizes_that_do_not_match_are_refused() -> None:
    with pytest.raises(ShapeError, match="logits"):
        draw_rows(logits(2, 4, 0), [1.0], [1.0], [0.5])
