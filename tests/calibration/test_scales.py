from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from minifloat.calibration.rules import Percentile
from minifloat.calibration.scales import activation_scales, kv_scales, saturation
from minifloat.calibration.stats import ActivationStats, KVStats, ModelIdentity, ModuleStats
from minifloat.errors import NotCalibratedError, UsageError
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.roles import fused_group
from minifloat.numerics.histogram import count_magnitudes

LAYER = "model.layers.0"
EXPERTS = f"{LAYER}.mlp.experts"


def seen(amax: list[float], tokens: int = 100) -> ModuleStats:
    return ModuleStats(np.array(amax, np.float32), np.full(len(amax), tokens))


UNSEEN = ModuleStats(np.zeros(2, np.float32), np.zeros(2, np.int64))


def make(inputs: Mapping[str, ModuleStats], kv: Mapping[str, KVStats] | None = None) -> ActivationStats:
    lengths = [len(module.amax) for module in inputs.values()] + [len(module.k_amax) for module in (kv or {}).values()]
    return ActivationStats(ModelIdentity("A", "", "", ""), max(lengths, default=0), 0, {}, inputs, kv or {})


def heads(k: list[list[float]], v: list[list[float]]) -> KVStats:
    return KVStats(np.array(k, np.float32), np.array(v, np.float32))


# Inputs


def test_a_scale_is_the_amax_over_448() -> None:
    found = activation_scales(make({f"{LAYER}.mlp.down_proj": seen([1, 5, 2])}))
    scale = found.scales[f"{LAYER}.mlp.down_proj"]
    assert scale == np.float32(5) / np.float32(448)
    assert isinstance(scale, np.float32)
    assert found.amax == {f"{LAYER}.mlp.down_proj": 5.0}
    assert not found.fallbacks


def test_the_rule_determines_the_scale() -> None:
    module = replace(seen([8.0]), histogram=count_magnitudes(np.array([1.0] * 99 + [8.0], np.float32)))
    found = activation_scales(make({"m": module}), Percentile(90.0))
    assert 1.0 <= found.amax["m"] < 1.2


def test_linears_that_a_server_fuses_share_the_largest_scale() -> None:
    names = [f"{LAYER}.self_attn.{name}_proj" for name in "qkvo"]
    inputs = {name: seen([float(index + 1)]) for index, name in enumerate(names)}
    inputs |= {f"{LAYER}.mlp.gate_proj": seen([7]), f"{LAYER}.mlp.up_proj": seen([6])}
    found = activation_scales(make(inputs))
    assert list(found.amax.values()) == [3, 3, 3, 4, 7, 7]
    assert found.scales[names[0]] == found.scales[names[2]]


def test_linears_that_only_their_family_fuses_share_the_scale_of_that_group() -> None:
    names = [f"{LAYER}.linear_attn.in_proj_{name}" for name in ("qkv", "z", "b")]
    inputs = {name: seen([float(index + 1)]) for index, name in enumerate(names)}
    family = family_of({"model_type": "qwen3_5_text"})
    found = activation_scales(make(inputs), group_of=lambda name: fused_group(name, family))
    assert list(found.amax.values()) == [2, 2, 3]


def test_different_layers_do_not_share_scales() -> None:
    inputs = {f"model.layers.{layer}.mlp.up_proj": seen([layer + 1.0]) for layer in range(3)}
    assert list(activation_scales(make(inputs)).amax.values()) == [1, 2, 3]


def expert(index: int, projection: str) -> str:
    return f"{EXPERTS}.{index}.{projection}"


def test_an_expert_below_the_floor_takes_the_largest_amax_of_its_layer_and_projection() -> None:
    inputs = {
        expert(0, "down_proj"): seen([3], 64),
        expert(1, "down_proj"): seen([5], 64),
        expert(2, "down_proj"): seen([1], 63),
        expert(3, "down_proj"): ModuleStats(np.zeros(1, np.float32), np.zeros(1, np.int64)),
        expert(0, "gate_proj"): seen([20], 64),
        "model.layers.1.mlp.experts.0.down_proj": seen([99], 64),
    }
    found = activation_scales(make(inputs))
    assert [found.amax[expert(index, "down_proj")] for index in range(4)] == [3, 5, 5, 5]
    assert set(found.fallbacks) == {expert(2, "down_proj"), expert(3, "down_proj")}
    assert "saw 63 tokens, fewer than 64" in found.fallbacks[expert(2, "down_proj")]
    assert "saw 0 tokens" in found.fallbacks[expert(3, "down_proj")]


def test_an_expert_below_the_floor_keeps_its_own_amax_if_it_is_the_largest() -> None:
    found = activation_scales(make({expert(0, "w2"): seen([1], 64), expert(1, "w2"): seen([9], 3)}))
    assert found.amax == {expert(0, "w2"): 1, expert(1, "w2"): 9}
    assert set(found.fallbacks) == {expert(1, "w2")}


def test_the_floor_applies_only_to_experts() -> None:
    assert not activation_scales(make({f"{LAYER}.mlp.down_proj": seen([2], 1)})).fallbacks


def test_fused_projections_of_an_expert_share_after_the_fallback() -> None:
    inputs = {
        expert(0, "gate_proj"): seen([3]),
        expert(0, "up_proj"): seen([4]),
        expert(1, "gate_proj"): seen([1], 2),
        expert(1, "up_proj"): seen([1], 2),
    }
    assert list(activation_scales(make(inputs)).amax.values()) == [4, 4, 4, 4]


def test_a_module_that_no_token_reached_is_named() -> None:
    inputs = {f"{LAYER}.mlp.down_proj": UNSEEN, f"{LAYER}.mlp.up_proj": seen([1, 1])}
    with pytest.raises(NotCalibratedError, match=f"^{LAYER}.mlp.down_proj: calibration sent no token") as caught:
        activation_scales(make(inputs))
    assert caught.value.modules == (f"{LAYER}.mlp.down_proj",)


def test_experts_of_a_layer_that_no_token_reached_are_named() -> None:
    with pytest.raises(NotCalibratedError) as caught:
        activation_scales(make({expert(0, "w2"): UNSEEN, expert(1, "w2"): UNSEEN, "m": seen([1, 2])}))
    assert caught.value.modules == (expert(0, "w2"), expert(1, "w2"))


def test_a_module_that_saw_only_zeros_is_named() -> None:
    with pytest.raises(NotCalibratedError, match="m: its input was zero in all of the calibration"):
        activation_scales(make({"m": seen([0, 0])}))


def test_a_module_that_was_not_observed_is_named() -> None:
    with pytest.raises(NotCalibratedError, match="lm_head: not in the activation statistics"):
        activation_scales(make({"m": seen([1])}), modules=["m", "lm_head"])


def test_many_modules_make_a_short_message() -> None:
    with pytest.raises(NotCalibratedError, match="and 92 more: ") as caught:
        activation_scales(make({}), modules=[f"m{index}" for index in range(100)])
    assert len(caught.value.modules) == 100


def test_modules_without_a_requested_scale_need_no_statistics() -> None:
    stats = make({"dead": UNSEEN, "alive": seen([1, 2])})
    assert list(activation_scales(stats, modules=["alive"]).scales) == ["alive"]


# The KV cache


def test_kv_scales_are_per_tensor() -> None:
    stats = make({}, {"attn": heads([[1, 4], [2, 3]], [[8, 5], [6, 7]])})
    found = kv_scales(stats)["attn"]
    assert (found.k, found.v) == (np.float32(4) / np.float32(448), np.float32(8) / np.float32(448))
    assert found.k.shape == ()


@pytest.mark.parametrize("silent", [heads([[0, 0]], [[1, 1]]), heads([[1, 1]], [[0, 0]])])
def test_an_attention_whose_cache_was_never_filled_is_named(silent: KVStats) -> None:
    with pytest.raises(NotCalibratedError, match=r"^attn\.1: "):
        kv_scales(make({}, {"attn.0": heads([[1, 1]], [[1, 1]]), "attn.1": silent}))


def test_an_attention_without_sequences_is_named() -> None:
    empty = np.empty((0, 2), np.float32)
    with pytest.raises(NotCalibratedError, match="attn"):
        kv_scales(make({}, {"attn": KVStats(empty, empty)}))


def test_caches_that_were_not_observed_are_named() -> None:
    stats = make({}, {"attn": heads([[1]], [[1]])})
    with pytest.raises(NotCalibratedError, match="other: not in the activation statistics"):
        kv_scales(stats, modules=["other"])


# Saturation


def sample(values: np.ndarray) -> ModuleStats:
    values = values.astype(np.float32)
    return ModuleStats(np.array([np.abs(values).max(initial=0)]), np.array([1]), count_magnitudes(values))


def counted(values: np.ndarray, scale: float) -> tuple[float, float]:
    """Return the fractions that saturate and that are flushed to zero, value by value with ml_dtypes' E4M3 rounding."""
    scaled = np.abs(values.astype(np.float32).astype(np.float64)) / scale
    saturated = np.isnan(scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    flushed = (scaled.astype(ml_dtypes.float8_e4m3fn) == 0) & (scaled > 0)
    return float(saturated.mean()), float(flushed.mean())


@pytest.mark.parametrize("factor", [2.0, 1.0, 0.97, 0.9, 0.5, 0.2, 0.05, 1e3, 1e5])
@pytest.mark.parametrize("seed", range(3))
def test_saturation_is_overestimated_by_at_most_one_bin_and_never_underestimated(factor: float, seed: int) -> None:
    values = np.random.default_rng(seed).standard_t(3, 20000)
    scale = float(np.abs(values).max()) / 448 * factor
    ours, exact = saturation(sample(values), scale), counted(values, scale)
    # A bin is at most an eighth wide: moving the bounds by an eighth counts all values of the bin that a bound cuts.
    assert exact[0] <= ours.saturated <= counted(values, scale / 1.125)[0]
    assert exact[1] <= ours.flushed <= counted(values, scale * 1.125)[1]


def test_no_calibration_value_saturates_with_the_rule_max() -> None:
    values = np.random.default_rng(0).standard_t(3, 20000)
    module = sample(values)
    scale = activation_scales(make({"m": module})).scales["m"]
    assert saturation(module, float(scale)).saturated == 0.0


def test_a_value_up_to_half_a_step_beyond_the_largest_does_not_count_as_saturated() -> None:
    assert saturation(sample(np.array([464.0, 1.0])), 1.0).saturated == 0.0
    assert saturation(sample(np.array([464.5, 1.0])), 1.0).saturated == 0.5


def test_half_of_the_smallest_subnormal_is_flushed() -> None:
    values = np.array([2.0**-10, 2.0**-10 * 1.125, 2.0**-11, 0.0])
    assert saturation(sample(values), 1.0).flushed == 0.5


def test_no_values_or_only_zeros_have_no_saturation() -> None:
    assert saturation(sample(np.zeros(0)), 1.0) == (0.0, 0.0)
    assert saturation(sample(np.zeros(3)), 1.0) == (0.0, 0.0)


def test_saturation_needs_a_histogram() -> None:
    with pytest.raises(UsageError, match="no histograms"):
        saturation(seen([1.0]), 1.0)
