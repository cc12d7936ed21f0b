"""The roofline agrees with arithmetic by hand, searches find their threshold, the table of hardware is consistent."""

from __future__ import annotations

import timeit
from dataclasses import replace

import pytest
import torch

from minifloat.deploy.estimate import hardware
from minifloat.deploy.estimate.hardware import PLANNED_HARDWARE, get_hardware
from minifloat.deploy.estimate.roofline import StepCost, bound, experts_read, step_bytes
from minifloat.errors import UnknownNameError, UsageError
from minifloat.kernels import processors
from minifloat.kernels.speed import measure_product_rate
from minifloat.numerics.formats import BFLOAT16, E2M1, E4M3


def test_the_larger_of_the_two_times_is_the_bound() -> None:
    device = get_hardware("h100", bandwidth=1e12, peak=1e14)
    assert device.ridges[BFLOAT16] == 100
    memory = bound(StepCost(2e9, {BFLOAT16: 1e11}, 4), device)
    assert (memory.memory_seconds, memory.compute_seconds) == (2e-3, 1e-3)
    assert (memory.limit, memory.intensity, memory.seconds) == ("memory", 50, 2e-3)
    assert memory.ridge == pytest.approx(100)
    assert memory.throughput == pytest.approx(2000)
    compute = bound(StepCost(2e9, {BFLOAT16: 3e11}, 4), device)
    assert (compute.limit, compute.seconds) == ("compute", pytest.approx(3e-3))


def test_formats_are_multiplied_at_their_own_peaks() -> None:
    device = get_hardware("h100", bandwidth=1e12, peak=1e14)
    mixed = bound(StepCost(1e9, {BFLOAT16: 1e11, E4M3: 2e11}, 1), device)
    assert mixed.compute_seconds == pytest.approx(1e-3 + 1e-3)
    assert mixed.ridge == pytest.approx(150)


def test_an_unknown_peak_leaves_only_the_bandwidth_bound() -> None:
    machine = replace(get_hardware("cpu", bandwidth=35e9, peak=1e12), peaks={})
    step = bound(StepCost(35e9, {BFLOAT16: 1e30}, 1), machine)
    assert (step.seconds, step.limit, step.ridge) == (1.0, "memory", None)


def test_bandwidth_and_peak_of_this_machine_are_measured_where_they_are_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = processors.available()
    monkeypatch.setattr(hardware, "measure_product_rate", lambda count: 1e11 * count)
    machine = get_hardware("cpu", bandwidth=35e9)
    assert (machine.bandwidth, dict(machine.peaks)) == (35e9, {BFLOAT16: 1e11 * threads})
    assert machine.source == f"bandwidth as given; peak measured with {threads} threads"
    step = bound(StepCost(35e9, {BFLOAT16: 4e11 * threads}, 1), machine)
    assert (step.seconds, step.limit) == (4.0, "compute")
    monkeypatch.setattr(hardware, "measure_product_rate", pytest.fail)
    assert get_hardware("cpu", bandwidth=35e9, peak=2e12).source == "bandwidth and peak as given"


def test_the_measured_peak_is_that_of_a_product_of_this_machine() -> None:
    x = torch.ones(1024, 1024)
    seconds = min(timeit.repeat(lambda: x @ x, number=1, repeat=5))
    rate = measure_product_rate(torch.get_num_threads())
    assert 0.1 < rate / (2 * 1024**3 / seconds) < 100  # BF16 instructions against float32


def test_fp8_came_with_ada_hopper_and_cdna3_and_fp4_with_blackwell_and_cdna4() -> None:
    known = {name: device for name, device in PLANNED_HARDWARE.items() if device.peaks}
    assert {name for name, device in known.items() if E4M3 not in device.peaks} == {"a100-40", "a100-80"}
    assert {name for name, device in known.items() if E2M1 in device.peaks} == {"b200", "mi355x"}
    for device in known.values():
        assert device.peaks.get(E4M3, 2 * device.peaks[BFLOAT16]) == pytest.approx(2 * device.peaks[BFLOAT16], rel=0.02)


def test_unknown_hardware_is_an_error_that_lists_the_names_and_figures_must_be_positive() -> None:
    with pytest.raises(UnknownNameError, match="a100-40, a100-80, l40s"):
        get_hardware("tpu")
    with pytest.raises(UsageError, match="bandwidth"):
        get_hardware("h100", bandwidth=0)
    with pytest.raises(UsageError, match="peak"):
        get_hardware("h100", peak=-1)


def test_a_step_reads_weights_once_and_every_cache() -> None:
    assert step_bytes(100, 3, 7.5) == 122.5


def test_one_token_reads_its_chosen_experts_and_many_tokens_read_all() -> None:
    assert experts_read(8, 2, 1) == 0.25
    assert experts_read(8, 2, 2) == pytest.approx(1 - 0.75**2)
    assert experts_read(8, 2, 1000) == pytest.approx(1)
    assert experts_read(8, 8, 1) == 1
