from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minifloat.calibration.rules import (
    RULES,
    HistogramRule,
    Max,
    MeanSquaredError,
    Percentile,
    Rule,
    expected_squared_error,
    parse_rule,
    to_scale,
)
from minifloat.calibration.stats import ModuleStats
from minifloat.errors import UnknownNameError, UsageError
from minifloat.numerics.formats import E4M3
from minifloat.numerics.histogram import count_magnitudes

E4M3_MAX = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)


def history(amax: list[float]) -> ModuleStats:
    array = np.array(amax, np.float32)
    return ModuleStats(array, np.ones(len(array), np.int64))


def sample(values: np.ndarray) -> ModuleStats:
    """Return the statistics of one sequence with these values."""
    values = values.astype(np.float32)
    return ModuleStats(np.array([np.abs(values).max()]), np.array([1]), count_magnitudes(values))


def heavy_tailed(seed: int = 0, size: int = 20000) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(3, size).astype(np.float32)


# The amax history


@given(st.lists(st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=5), min_size=1, max_size=8))
@settings(deadline=None)
def test_max_gives_the_scale_of_llm_compressors_static_minmax(batches: list[list[float]]) -> None:
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    minimum, maximum = torch.tensor(np.inf), torch.tensor(-np.inf)
    for batch in batches:  # static_minmax keeps the running minimum and maximum over all batches
        minimum = torch.minimum(minimum, torch.tensor(batch).min())
        maximum = torch.maximum(maximum, torch.tensor(batch).max())
    arguments = QuantizationArgs(num_bits=8, type="float", strategy="tensor", symmetric=True)
    theirs, _ = calculate_qparams(minimum[None], maximum[None], arguments)

    ours = to_scale(Max().amax(history([np.abs(batch).max() for batch in batches])))
    if max(np.abs(batch).max() for batch in batches) > 1e-30:  # llm-compressor gives zeros another tiny scale
        assert ours == theirs.item()


def test_sequences_without_a_token_for_the_module_do_not_count() -> None:
    gaps = ModuleStats(np.array([0, 3, 0, 0, 1, 2, 0], np.float32), np.array([0, 1, 0, 0, 1, 1, 0]))
    assert Max().amax(gaps) == Max().amax(history([3, 1, 2])) > 0


# Histograms


@pytest.mark.parametrize("percentile", [0.1, 25, 50, 90, 99, 99.9, 99.99, 100])
@pytest.mark.parametrize("seed", range(5))
def test_percentile_is_within_a_bin_of_the_sorted_values(percentile: float, seed: int) -> None:
    values = heavy_tailed(seed)
    exact = np.percentile(np.abs(values.astype(np.float64)), percentile, method="inverted_cdf")
    ours = Percentile(percentile).amax(sample(values))
    assert abs(ours / exact - 1) <= 1 / 8
    assert ours <= np.abs(values).max()


def test_percentile_interpolates_within_its_bin() -> None:
    values = np.linspace(1.0, 1.125, 1000, endpoint=False)
    assert Percentile(30).amax(sample(values)) == pytest.approx(1.0375, abs=1e-4)


def test_percentile_100_is_the_maximum() -> None:
    values = heavy_tailed()
    assert Percentile(100).amax(sample(values)) == Max().amax(sample(values))


def test_percentile_ignores_zeros() -> None:
    values = heavy_tailed()
    sparse = np.concatenate([values, np.zeros(10**6)])
    assert Percentile(99).amax(sample(sparse)) == Percentile(99).amax(sample(values)) > 0


def round_trip_error(values: np.ndarray, scale: float) -> float:
    """Return the mean squared error of saturating E4M3, computed value by value."""
    scaled = np.clip(values.astype(np.float64) / scale, -E4M3_MAX, E4M3_MAX)
    decoded = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    return float(np.mean((values - decoded) ** 2))


@pytest.mark.parametrize("factor", [1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.01, 3.0, 1000.0])
@pytest.mark.parametrize("values", [heavy_tailed(0), np.random.default_rng(1).normal(size=20000)], ids=["t", "normal"])
def test_the_expected_squared_error_is_that_of_the_values(values: np.ndarray, factor: float) -> None:
    scale = float(np.abs(values).max()) / E4M3_MAX * factor
    ours = expected_squared_error(sample(values), scale)
    assert ours == pytest.approx(round_trip_error(values.astype(np.float32), scale), rel=0.1)


def test_the_expected_squared_error_counts_zeros_as_exact() -> None:
    values = heavy_tailed()
    sparse = np.concatenate([values, np.zeros(3 * len(values))])
    assert expected_squared_error(sample(sparse), 0.01) == pytest.approx(
        expected_squared_error(sample(values), 0.01) / 4
    )
    assert expected_squared_error(sample(np.zeros(4)), 0.01) == 0.0


@pytest.mark.parametrize("count", [1, 5])
def test_the_expected_squared_error_of_values_at_one_edge_is_that_of_the_value(count: int) -> None:
    module = sample(np.ones(count))
    assert expected_squared_error(module, 1.0) == pytest.approx(0.0, abs=1e-9)
    assert expected_squared_error(module, 1 / 64) == pytest.approx(0.0, abs=1e-9)
    assert expected_squared_error(module, 0.5 / E4M3_MAX) == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_mse_is_as_good_as_the_best_of_all_clips(seed: int) -> None:
    values = heavy_tailed(seed, 5000)
    values[0] = 40 * np.abs(values).max()  # an outlier so large that clipping it may reduce the error
    largest = float(np.abs(values).max())
    brute = min(round_trip_error(values, clip / E4M3_MAX) for clip in np.geomspace(largest / 16, largest, 200))
    ours = MeanSquaredError().amax(sample(values))
    assert round_trip_error(values, ours / E4M3_MAX) <= 1.15 * brute


def test_mse_clips_if_clipping_reduces_the_error() -> None:
    # With the outlier in range, the step size at all other values is 1.75 * 32 / 448; without it, 1.125 * 32 / 448.
    values = np.random.default_rng(0).uniform(1, 1.125, 100_000)
    values[0] = 1.75
    ours = MeanSquaredError().amax(sample(values))
    assert ours == 1.125
    assert round_trip_error(values, ours / E4M3_MAX) < 0.5 * round_trip_error(values, 1.75 / E4M3_MAX)


@pytest.mark.parametrize("rule", [rule() for rule in RULES.values() if issubclass(rule, HistogramRule)], ids=str)
def test_a_histogram_rule_without_a_histogram_is_refused(rule: Rule) -> None:
    with pytest.raises(UsageError, match=f"rule {rule.name}: these statistics have no histograms"):
        rule.amax(history([1.0]))


@pytest.mark.parametrize("rule", [rule() for rule in RULES.values()], ids=str)
def test_a_tensor_of_zeros_has_amax_0(rule: Rule) -> None:
    assert rule.amax(sample(np.zeros(5))) == 0.0


@pytest.mark.parametrize("rule", [rule() for rule in RULES.values()], ids=str)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_every_rule_gives_a_scale_above_0_and_finite(rule: Rule, values: list[float]) -> None:
    amax = rule.amax(sample(np.array(values)))
    scale = to_scale(amax)
    assert np.isfinite(amax)
    assert np.isfinite(scale)
    assert scale >= np.finfo(np.float32).tiny


# Scales and names


def test_a_scale_is_a_float32_quotient() -> None:
    scale = to_scale(np.float32(3.3))
    assert scale.dtype == np.float32
    assert scale == np.float32(3.3) / np.float32(448)
    assert to_scale([1.0, 2.0]).shape == (2,)


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 448 * 1.1e-38])
def test_a_scale_is_never_below_the_smallest_normal(amax: float) -> None:
    assert to_scale(amax) == np.finfo(np.float32).tiny


def test_an_amax_beyond_float32_gives_the_largest_scale() -> None:
    assert to_scale(1e39) == np.finfo(np.float32).max / np.float32(E4M3.max)


@pytest.mark.parametrize("rule", [rule() for rule in RULES.values()], ids=str)
def test_the_text_of_a_rule_parses_to_the_same_rule(rule: Rule) -> None:
    assert parse_rule(str(rule)) == rule
    assert parse_rule(rule.name) == rule


def test_options_of_a_rule_are_parsed() -> None:
    assert parse_rule("mse:octaves=2") == MeanSquaredError(2)
    assert parse_rule("percentile:percentile=99.9") == Percentile(99.9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("median", "unknown calibration rule 'median'; valid: max, percentile, mse"),
        ("", "unknown calibration rule ''"),
        ("mse:length=3", "unknown option of rule mse 'length'; valid: octaves"),
        ("max:history=3", "rule max: takes no options"),
    ],
)
def test_an_unknown_name_lists_the_valid_ones(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_rule(text)
    assert isinstance(caught.value, UnknownNameError) or "no options" in message


@pytest.mark.parametrize(
    "text",
    [
        "percentile:percentile=0",
        "percentile:percentile=101",
        "percentile:percentile=nan",
        "mse:octaves=0",
        "mse:octaves=x",
        "mse:octaves",
        "mse:octaves=1.5",
    ],
)
def test_a_value_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=text.partition(":")[2].partition("=")[0]):
        parse_rule(text)
