"""Static scales are written as servers expect them, and modules without statistics are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from converting import quantization_config

from minifloat.calibration.result import Calibration
from minifloat.calibration.rules import parse_rule
from minifloat.calibration.stats import ActivationStats, KVStats, ModelIdentity, ModuleStats
from minifloat.checkpoint import Checkpoint
from minifloat.errors import NotCalibratedError, SaturationError, StatsError, UsageError
from minifloat.model.layouts import describe
from minifloat.numerics.divisor import scalar_global_divisor
from minifloat.numerics.formats import E2M1, E4M3
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.histogram import count_magnitudes
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.convert import convert_checkpoint
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions
from minifloat.quantize.report import QuantizeReport

Make = Callable[..., Path]
LINEARS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def stats_of(source: Path, *, largest: float = 8.0, skip: tuple[str, ...] = (), seed: int = 0) -> ActivationStats:
    """Return statistics of three sequences for every linear; q/k/v and gate/up have different inputs on purpose."""
    rng = np.random.default_rng(seed)
    inputs = {}
    for layer in range(2):
        for name in LINEARS:
            module = f"model.layers.{layer}.{name}"
            if module in skip:
                continue
            values = rng.uniform(0.1, largest, (3, 64)).astype(np.float32)
            inputs[module] = ModuleStats(values.max(axis=1), np.full(3, 64), count_magnitudes(values))
    kv = {
        f"model.layers.{layer}.self_attn": KVStats(*rng.uniform(1, 9, (2, 3, 2)).astype(np.float32))
        for layer in range(2)
    }
    with Checkpoint.open(source) as checkpoint:
        return ActivationStats(ModelIdentity.of(checkpoint), 3, 192, {"sources": ["made up"]}, inputs, kv)


def calibration(stats: ActivationStats, rule: str = "max", **options: object) -> Calibration:
    return Calibration(stats, parse_rule(rule), **options)  # type: ignore[arg-type]


def calibrated(source: Path, out: Path, scheme: str = "fp8-static", **options: Any) -> QuantizeReport:
    return quantize_checkpoint(
        source, out, scheme, QuantizeOptions(**options), calibration=calibration(stats_of(source))
    )


def test_fused_layers_get_one_shared_input_scale(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint(shards=3)
    stats = stats_of(source)
    quantize_checkpoint(source, tmp_path / "out", "fp8-static", calibration=calibration(stats))
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        weights = describe(checkpoint).weights
        written = {
            name: checkpoint.read(w.input_scale).view(np.float32) for name, w in weights.items() if w.input_scale
        }
    assert len(written) == 14
    for layer in ("model.layers.0", "model.layers.1"):
        for family in ("qkv", "o"):
            members = [f"{layer}.self_attn.{letter}_proj" for letter in family]
            expected = np.float32(max(stats.inputs[name].max for name in members)) / np.float32(E4M3.max)
            assert all(written[name].tolist() == [expected] for name in members)


@pytest.mark.parametrize("rule", ["max", "mse"])
def test_fused_layers_share_the_divisor_of_nvfp4_inputs_which_comes_from_the_largest_amax(
    make_checkpoint: Make, tmp_path: Path, rule: str
) -> None:
    source = make_checkpoint()
    stats = stats_of(source)
    report = quantize_checkpoint(source, tmp_path / "out", "nvfp4-w4a4", calibration=calibration(stats, rule))
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        weights = describe(checkpoint).weights
        written = {name: checkpoint.read(f"{name}.input_global_scale").view(np.float32) for name in weights}
    assert len(written) == 14
    for layer in ("model.layers.0", "model.layers.1"):
        for family in ("qkv", "o"):
            members = [f"{layer}.self_attn.{letter}_proj" for letter in family]
            expected = scalar_global_divisor(max(stats.inputs[name].max for name in members))
            assert all(written[name].tolist() == [expected] for name in members)
    for activation in report.activations:
        largest = E4M3.max * E2M1.max / float(written[activation.module][0])
        assert activation.scale * E2M1.max == largest
        assert largest / 2 < activation.amax * (1 + 1e-6)
        assert activation.amax <= largest * (1 + 1e-6)
    assert len(report.notes) == (rule != "max")
    assert all("assumes one scale" in note for note in report.notes)


def test_a_conversion_to_modelopt_stores_the_factor_in_place_of_the_divisor(
    make_checkpoint: Make, tmp_path: Path
) -> None:
    source, out, other = make_checkpoint(), tmp_path / "out", tmp_path / "modelopt"
    quantize_checkpoint(source, out, "nvfp4-w4a4", calibration=calibration(stats_of(source)))
    convert_checkpoint(out, other, "modelopt")  # the reciprocal is exact, so that nothing has to be rounded
    name = "model.layers.0.mlp.down_proj"
    with Checkpoint.open(out) as ours, Checkpoint.open(other) as theirs:
        divisor = ours.read(f"{name}.input_global_scale").view(np.float32)[0]
        assert theirs.read(f"{name}.input_scale").view(np.float32).item() == np.float32(1) / divisor
        assert describe(theirs).weights[name].activation == SCHEMES["nvfp4-w4a4"].activation
        assert describe(ours).weights[name].input_scale == f"{name}.input_global_scale"


@pytest.mark.parametrize(("scheme", "kind"), [("nvfp4-w4a4", "W4A16"), ("fp8-static", "W8A16")])
def test_static_inputs_without_calibration_are_written_weight_only_with_a_note(
    make_checkpoint: Make, tmp_path: Path, scheme: str, kind: str
) -> None:
    report = quantize_checkpoint(make_checkpoint(), tmp_path / "out", scheme)
    group = quantization_config(tmp_path / "out")["config_groups"]["group_0"]
    assert group["input_activations"] is None
    assert group["format"] == ("nvfp4-pack-quantized" if scheme == "nvfp4-w4a4" else "naive-quantized")
    assert "14 weights" in report.notes[0]
    assert "no calibration" in report.notes[0]
    assert f"({kind})" in report.notes[0]


def test_the_config_declares_static_activations(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    calibrated(source, tmp_path / "out")
    config = quantization_config(tmp_path / "out")
    group = config["config_groups"]["group_0"]
    assert group["input_activations"]["strategy"] == "tensor"
    assert group["input_activations"]["dynamic"] is False
    assert group["format"] == "float-quantized"
    assert config["kv_cache_scheme"] is None


@pytest.mark.parametrize("scheme", ["fp8-static", "mxfp4", "fp8-block"])
def test_kv_scales_are_written_for_any_scheme(make_checkpoint: Make, tmp_path: Path, scheme: str) -> None:
    source = make_checkpoint(shards=2)
    stats = stats_of(source)
    quantize_checkpoint(
        source, tmp_path / "out", scheme, QuantizeOptions(kv_cache=True), calibration=calibration(stats)
    )
    tensors: dict[str, np.ndarray] = {}
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        description = describe(checkpoint)
        for name in description.auxiliary:
            tensors[name] = checkpoint.read(name).view(np.float32)
    assert description.kv is not None
    assert (description.kv.element, description.kv.granularity) == (E4M3, TENSOR)
    assert len(tensors) == 4
    for attention, kv in stats.kv.items():
        assert tensors[f"{attention}.k_scale"] == kv.k_amax.max() / np.float32(E4M3.max)
        assert tensors[f"{attention}.v_scale"] == kv.v_amax.max() / np.float32(E4M3.max)


def test_kv_scales_use_the_rule_max_if_the_rule_needs_histograms_with_a_note(
    make_checkpoint: Make, tmp_path: Path
) -> None:
    source = make_checkpoint()
    stats = stats_of(source)
    report = quantize_checkpoint(
        source,
        tmp_path / "out",
        "fp8-static",
        QuantizeOptions(kv_cache=True),
        calibration=calibration(stats, "percentile"),
    )
    assert "rule max" in report.notes[0]
    scales = {activation.module: activation.scale for activation in report.activations}
    expected = stats.kv["model.layers.0.self_attn"].k_amax.max() / np.float32(E4M3.max)
    assert scales["model.layers.0.self_attn.k"] == expected


def test_kv_scales_of_a_layer_that_is_kept_are_written_with_it(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    calibrated(source, tmp_path / "out", "fp8", overrides=[r"layers\.0\.self_attn=bf16"], kv_cache=True)
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert "model.layers.0.self_attn.k_scale" in checkpoint.tensors


def test_the_report_counts_the_scales(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    report = calibrated(source, tmp_path / "out", kv_cache=True)
    with Checkpoint.open(tmp_path / "out") as after:
        assert report.output_bytes == sum(info.nbytes for info in after.tensors.values())
    assert len(report.activations) == 14 + 4
    saved = json.loads((tmp_path / "out" / "minifloat.json").read_text())
    assert saved["recipe"]["calibration"]["rule"] == "max"
    assert saved["provenance"]["command"].endswith("--scheme fp8-static --stats STATS --rule max --kv-cache fp8")
    assert saved["recipe"]["calibration"]["data"] == {"sources": ["made up"]}


def test_an_fp8_kv_cache_without_calibration_is_refused(make_checkpoint: Make, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--calibration DATA or --stats FILE"):
        quantize_checkpoint(make_checkpoint(), tmp_path / "out", "fp8", QuantizeOptions(kv_cache=True))


def test_a_static_override_without_calibration_is_written_weight_only(make_checkpoint: Make, tmp_path: Path) -> None:
    report = quantize_checkpoint(
        make_checkpoint(), tmp_path / "out", "fp8", QuantizeOptions(overrides=["down_proj=fp8-static"])
    )
    groups = quantization_config(tmp_path / "out")["config_groups"]
    assert all(group["input_activations"] is None for group in groups.values())
    assert "2 weights" in report.notes[0]


def test_a_module_missing_from_the_statistics_is_refused_by_name(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    stats = stats_of(source, skip=("model.layers.1.mlp.down_proj",))
    with pytest.raises(NotCalibratedError, match=r"model\.layers\.1\.mlp\.down_proj"):
        quantize_checkpoint(source, tmp_path / "out", "fp8-static", calibration=calibration(stats))
    assert not (tmp_path / "out").exists()


def test_statistics_of_another_model_are_refused(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    other = make_checkpoint("other", config={"rms_norm_eps": 0.5})
    with pytest.raises(StatsError, match="another model"):
        quantize_checkpoint(source, tmp_path / "out", "fp8-static", calibration=calibration(stats_of(other)))


def test_saturation_on_held_out_text_is_reported_and_limited(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    stats, wilder = stats_of(source, largest=2.0), stats_of(source, largest=8.0, seed=1)
    report = quantize_checkpoint(
        source, tmp_path / "free", "fp8-static", calibration=calibration(stats, held_out=wilder)
    )
    saturated = [activation.saturated for activation in report.activations if activation.saturated is not None]
    assert len(saturated) == 14
    assert min(saturated) > 0.5
    with pytest.raises(SaturationError, match=r"14 of 14 inputs saturate .* more often than 0\.001"):
        quantize_checkpoint(
            source,
            tmp_path / "limited",
            "fp8-static",
            calibration=calibration(stats, held_out=wilder, max_saturation=0.001),
        )
    calm = calibration(stats, held_out=stats_of(source, largest=1.0, seed=2), max_saturation=0.001)
    assert quantize_checkpoint(source, tmp_path / "calm", "fp8-static", calibration=calm).activations


def test_nvfp4_inputs_saturate_only_above_the_amax_of_calibration(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    stats = stats_of(source, largest=2.0)
    for largest, seed in ((1.0, 2), (8.0, 1)):
        held_out = stats_of(source, largest=largest, seed=seed)
        report = quantize_checkpoint(
            source, tmp_path / str(seed), "nvfp4-w4a4", calibration=calibration(stats, held_out=held_out)
        )
        saturated = [activation.saturated or 0.0 for activation in report.activations]
        assert len(saturated) == 14
        assert max(saturated) == 0 if largest < 2 else min(saturated) > 0.5
        assert all(activation.flushed is None for activation in report.activations)


def test_a_limit_without_held_out_text_is_refused(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    with pytest.raises(UsageError, match="held-out"):
        quantize_checkpoint(
            source, tmp_path / "out", "fp8-static", calibration=calibration(stats_of(source), max_saturation=0.1)
        )


def test_the_fp8_layout_has_no_static_scales(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint(tensors={"model.layers.0.self_attn.k_proj.weight": np.ones((128, 128), np.float32)})
    with Checkpoint.open(source) as checkpoint:
        kv = {"model.layers.0.self_attn": KVStats(np.ones((1, 2), np.float32), np.ones((1, 2), np.float32))}
        stats = ActivationStats(ModelIdentity.of(checkpoint), 1, 4, {}, {}, kv)
    with pytest.raises(UsageError, match="cannot announce KV scales"):
        quantize_checkpoint(
            source,
            tmp_path / "out",
            "fp8-block",
            QuantizeOptions(layout="fp8", kv_cache=True),
            calibration=calibration(stats),
        )


def test_equal_calls_write_equal_files(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    for name in ("a", "b"):
        calibrated(source, tmp_path / name, kv_cache=True)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert one == two
