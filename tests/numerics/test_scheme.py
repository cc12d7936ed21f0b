"""Tests of the table of schemes: formats and bits per weight."""

from __future__ import annotations

import pytest

from minifloat.errors import UnknownNameError, UsageError
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, GROUP_16, GROUP_32, GROUP_128, TENSOR, TOKEN
from minifloat.numerics.scheme import (
    DEFAULT_SCHEME,
    SCHEMES,
    ActivationSpec,
    ScaleRule,
    WeightSpec,
    get_scheme,
)

NAMES = ["fp8-block", "fp8", "fp8-static", "fp8-dynamic", "mxfp8", "mxfp4", "nvfp4"]
NAMES += ["mxfp8-w8a8", "mxfp4-w4a8", "mxfp4-w4a4", "nvfp4-w4a4"]


def test_the_table_holds_exactly_these_schemes_under_their_own_names() -> None:
    assert list(SCHEMES) == NAMES
    assert [scheme.name for scheme in SCHEMES.values()] == NAMES


def test_the_default_scheme_is_fp8_block() -> None:
    assert DEFAULT_SCHEME == "fp8-block"
    assert get_scheme(DEFAULT_SCHEME) is SCHEMES["fp8-block"]


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("fp8-block", WeightSpec(E4M3, BLOCK_128, FLOAT32, ScaleRule.RCEIL)),
        ("fp8", WeightSpec(E4M3, CHANNEL, FLOAT32, ScaleRule.AMAX)),
        ("fp8-static", WeightSpec(E4M3, TENSOR, FLOAT32, ScaleRule.AMAX)),
        ("fp8-dynamic", WeightSpec(E4M3, CHANNEL, FLOAT32, ScaleRule.AMAX)),
        ("mxfp8", WeightSpec(E4M3, GROUP_32, E8M0, ScaleRule.RCEIL)),
        ("mxfp4", WeightSpec(E2M1, GROUP_32, E8M0, ScaleRule.SEARCH)),
        ("nvfp4", WeightSpec(E2M1, GROUP_16, E4M3, ScaleRule.SEARCH)),
    ],
)
def test_every_scheme_stores_weights_in_its_format(name: str, weight: WeightSpec) -> None:
    assert SCHEMES[name].weight == weight


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("fp8-block", ActivationSpec(E4M3, GROUP_128, dynamic=True)),
        ("fp8", None),
        ("fp8-static", ActivationSpec(E4M3, TENSOR, dynamic=False)),
        ("fp8-dynamic", ActivationSpec(E4M3, TOKEN, dynamic=True)),
        ("mxfp8", None),
        ("mxfp4", None),
        ("nvfp4", None),
        ("mxfp8-w8a8", ActivationSpec(E4M3, GROUP_32, dynamic=True, scale=E8M0)),
        ("mxfp4-w4a8", ActivationSpec(E4M3, GROUP_32, dynamic=True, scale=E8M0)),
        ("mxfp4-w4a4", ActivationSpec(E2M1, GROUP_32, dynamic=True, scale=E8M0)),
        ("nvfp4-w4a4", ActivationSpec(E2M1, GROUP_16, dynamic=True, scale=E4M3)),
    ],
)
def test_every_scheme_declares_its_activation_format(name: str, activation: ActivationSpec | None) -> None:
    assert SCHEMES[name].activation == activation


def test_only_static_inputs_and_those_of_nvfp4_need_calibration() -> None:
    declared = {name: scheme.activation for name, scheme in SCHEMES.items() if scheme.activation is not None}
    assert [name for name, spec in declared.items() if spec.needs_calibration] == ["fp8-static", "nvfp4-w4a4"]


@pytest.mark.parametrize(
    ("name", "shape", "bits"),
    [
        ("fp8-block", (256, 256), 8 + 4 * 32 / 65536),
        ("fp8-block", (129, 129), 8 + 4 * 32 / 16641),
        ("fp8", (4, 64), 8.5),
        ("fp8-dynamic", (4, 64), 8.5),
        ("fp8-static", (4, 64), 8.125),
        ("mxfp8", (4, 64), 8.25),
        ("mxfp4", (4, 64), 4.25),
        ("mxfp4", (1, 33), 4 + 16 / 33),
        ("nvfp4", (4, 64), 4.5 + 32 / 256),
    ],
)
def test_bits_per_weight_include_the_scales(name: str, shape: tuple[int, int], bits: float) -> None:
    assert SCHEMES[name].weight.bits_per_weight(shape) == pytest.approx(bits, rel=1e-12)


def test_bits_per_weight_of_an_empty_matrix_are_those_of_the_element() -> None:
    assert SCHEMES["mxfp4"].weight.bits_per_weight((0, 0)) == 4


def test_only_nvfp4_has_a_global_scale_and_only_it_and_per_tensor_schemes_need_the_tensor_amax() -> None:
    assert [name for name, scheme in SCHEMES.items() if scheme.weight.has_global_scale] == ["nvfp4", "nvfp4-w4a4"]
    needy = [name for name, scheme in SCHEMES.items() if scheme.weight.needs_tensor_amax]
    assert needy == ["fp8-static", "nvfp4", "nvfp4-w4a4"]


def test_an_unknown_scheme_lists_the_valid_ones() -> None:
    with pytest.raises(UnknownNameError) as caught:
        get_scheme("fp9")
    assert str(caught.value) == f"unknown scheme 'fp9'; valid: {', '.join(NAMES)}"
    assert isinstance(caught.value, UsageError)
    assert caught.value.valid == tuple(NAMES)


@pytest.mark.parametrize("name", ["FP8", "", "fp8 ", "mxfp4-search"])
def test_names_are_matched_exactly(name: str) -> None:
    with pytest.raises(UnknownNameError):
        get_scheme(name)
