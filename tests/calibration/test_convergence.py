from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minifloat.calibration.scales import activation_scales, convergence_report, kv_scales, trajectory
from minifloat.calibration.stats import ActivationStats, KVStats, ModelIdentity, ModuleStats


def make(inputs: dict[str, list[float]], kv: dict[str, list[float]] | None = None) -> ActivationStats:
    """Each sequence has a token for a module unless its amax is 0."""
    modules = {
        name: ModuleStats(np.array(amax, np.float32), (np.array(amax) > 0).astype(np.int64))
        for name, amax in inputs.items()
    }
    heads = {name: np.array(amax, np.float32)[:, None] for name, amax in (kv or {}).items()}
    length = len(next(iter((inputs | (kv or {})).values())))
    caches = {name: KVStats(amax, 2 * amax) for name, amax in heads.items()}
    return ActivationStats(ModelIdentity("A", "", "", ""), length, 0, {}, modules, caches)


def test_the_trajectory_ends_at_the_static_scale() -> None:
    amax = np.random.default_rng(0).random(20).astype(np.float32)
    steps = trajectory(amax)
    assert steps.dtype == np.float32
    for end in (1, 7, 20):
        stats = make({"m": amax[:end].tolist()}, {"a": amax[:end].tolist()})
        assert steps[end - 1] == activation_scales(stats).scales["m"] == kv_scales(stats)["a"].k


@given(st.lists(st.floats(0.5, 2, width=32), min_size=1, max_size=30), st.integers(1, 8), st.floats(0.001, 0.5))
def test_settling_is_told_as_by_a_loop(amax: list[float], window: int, tolerance: float) -> None:
    steps = np.maximum.accumulate(np.array(amax, np.float32)).astype(np.float64)
    near = [abs(step / steps[-1] - 1) <= tolerance for step in steps]
    expected = len(steps) > window and all(near[-window - 1 :])
    found = convergence_report(make({"m": amax}), tolerance=tolerance, window=window).scales["m.input_scale"]
    after = next(count for count in range(1, len(near) + 1) if all(near[count - 1 :]))
    assert found.settled_after == (after if expected else None)


def test_the_report_says_when_each_scale_settled_and_which_have_not() -> None:
    stats = make(
        {
            "early": [4.0] + [1.0] * 9,
            "late": [1.0] * 4 + [2.0] * 6,
            "still": [1.0] * 9 + [3.0],
            "drifting": [1.0] * 8 + [1.0, 1.5],
            "unseen": [0.0] * 10,
        },
        {"attn": [1.0, 3.0] + [2.0] * 8},
    )
    found = convergence_report(stats, tolerance=0.01, window=3)
    assert {name: one.settled_after for name, one in found.scales.items()} == {
        "early.input_scale": 1,
        "late.input_scale": 5,
        "still.input_scale": None,
        "drifting.input_scale": None,
        "unseen.input_scale": None,
        "attn.k_scale": 2,
        "attn.v_scale": 2,
    }
    assert found.unsettled == ("unseen.input_scale", "still.input_scale", "drifting.input_scale")
    assert found.scales["still.input_scale"].change == pytest.approx(2 / 3)
    assert found.scales["unseen.input_scale"].change == math.inf
    assert found.sequences == 10


def test_a_sequence_without_a_token_for_a_module_leaves_its_scale() -> None:
    stats = make({"expert": [0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0], "late": [0.0] * 5 + [2.0, 0.0]})
    found = convergence_report(stats, window=3)
    assert found.scales["expert.input_scale"].settled_after == 3
    assert found.unsettled == ("late.input_scale",)


def test_no_sequence_has_settled_nothing() -> None:
    assert convergence_report(make({"m": []})).unsettled == ("m.input_scale",)
