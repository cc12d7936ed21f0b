"""Tests of CastStats: sums of parts, and ratios of empty tensors and tensors of zeros."""

from __future__ import annotations

import math

import pytest

from minifloat.numerics.cast_stats import CastStats


def test_sqnr_is_ten_log10_of_the_ratio() -> None:
    assert CastStats(elements=4, signal=1000.0, noise=1.0).sqnr_db == pytest.approx(30.0)


def test_sqnr_does_not_overflow_when_the_noise_is_tiny() -> None:
    assert CastStats(elements=1, signal=1e300, noise=1e-300).sqnr_db == pytest.approx(6000.0)


def test_a_lossless_cast_and_an_empty_one_have_infinite_sqnr() -> None:
    assert CastStats(elements=2, signal=2.0).sqnr_db == math.inf
    assert CastStats().sqnr_db == math.inf


def test_noise_without_signal_is_minus_infinity() -> None:
    assert CastStats(elements=1, noise=1.0).sqnr_db == -math.inf


def test_fractions_are_counts_divided_by_the_number_of_elements() -> None:
    stats = CastStats(elements=8, saturated=2, flushed=4)
    assert (stats.saturated_fraction, stats.flushed_fraction) == (0.25, 0.5)
    assert (CastStats().saturated_fraction, CastStats().flushed_fraction) == (0.0, 0.0)


def test_statistics_of_parts_add_up_field_by_field() -> None:
    parts = [CastStats(1, 2.0, 3.0, 4, 5), CastStats(10, 20.0, 30.0, 40, 50)]
    assert sum(parts, CastStats()) == CastStats(11, 22.0, 33.0, 44, 55)
