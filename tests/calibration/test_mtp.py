"""Layers of multi-token prediction (MTP), which transformers does not run: calibration does not need them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minifloat import QuantizeOptions, quantize_checkpoint
from minifloat.calibration.calibrate import calibrate_set
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.result import Calibration
from minifloat.calibration.rules import parse_rule
from minifloat.calibration.stats import ActivationStats
from minifloat.errors import NotCalibratedError

_LAYERS = 2
_LAST, _MTP = f"model.layers.{_LAYERS - 1}.", f"model.layers.{_LAYERS}."
_DATA = CalibrationSet((tuple(range(20, 120)),), {"sources": []})


@pytest.fixture(scope="module")
def source(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers and one of multi-token prediction."""
    folder = make_model(tmp_path_factory.mktemp("mtp") / "model", "deepseek_v3", num_nextn_predict_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace(_LAST, _MTP): tensor.clone() for name, tensor in tensors.items() if name.startswith(_LAST)}
    tensors[f"{_MTP}eh_proj.weight"] = torch.randn(64, 128, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def stats(source: Path) -> ActivationStats:
    return calibrate_set(source, _DATA, CalibrateOptions())


def test_static_scales_are_written_for_a_model_with_an_mtp_layer(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    for options in (CalibrateOptions(), CalibrateOptions(max_memory=300_000)):
        stats = calibrate_set(source, _DATA, options)
        assert not [module for module in stats.inputs if module.startswith(_MTP)]
    quantize_checkpoint(source, tmp_path / "out", "fp8-static", calibration=Calibration(stats, parse_rule("max")))
    output = load_file(tmp_path / "out" / "model.safetensors")
    assert f"{_LAST}self_attn.o_proj.input_scale" in output
    assert {name for name in output if name.startswith(_MTP)} == {name for name in tensors if name.startswith(_MTP)}


@pytest.mark.parametrize(("scheme", "drafts"), [("fp8-static", "fp8-dynamic"), ("nvfp4-w4a4", "nvfp4")])
def test_mtp_layers_that_are_quantized_on_request_need_no_static_scales(
    scheme: str, drafts: str, source: Path, stats: ActivationStats, tmp_path: Path
) -> None:
    calibration = Calibration(stats, parse_rule("max"))
    report = quantize_checkpoint(source, tmp_path / "out", scheme, QuantizeOptions(mtp=True), calibration=calibration)
    formats = {tensor.name: tensor.detail for tensor in report.tensors if tensor.action == "quantized"}
    assert {detail for name, detail in formats.items() if name.startswith(_MTP)} == {drafts}
    assert {detail for name, detail in formats.items() if not name.startswith(_MTP)} == {scheme}
    output = load_file(tmp_path / "out" / "model.safetensors")
    static = ("input_scale", "input_global_scale")
    assert not [name for name in output if name.startswith(_MTP) and name.endswith(static)]
    assert any(f"weights of multi-token prediction are {drafts}, not {scheme}" in note for note in report.notes)


def test_an_override_to_static_scales_in_an_mtp_layer_is_refused(
    source: Path, stats: ActivationStats, tmp_path: Path
) -> None:
    calibration, overrides = Calibration(stats, parse_rule("max")), [f"{_MTP}self_attn.o_proj=fp8-static"]
    message = rf"^{_MTP}self_attn\.o_proj: no text runs through layers of multi-token .* them with fp8-dynamic$"
    with pytest.raises(NotCalibratedError, match=message):
        quantize_checkpoint(
            source, tmp_path / "out", "fp8-block", QuantizeOptions(overrides=overrides), calibration=calibration
        )
