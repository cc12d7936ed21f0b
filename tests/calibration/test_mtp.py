"""Layers of multi-token prediction (MTP), which transformers does not run: calibration does not need them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from minifloat import quantize_checkpoint
from minifloat.calibration.calibrate import calibrate
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.options import RunOptions
from minifloat.calibration.rules import parse_rule
from minifloat.quantize.static_scales import Calibration

_LAYERS = 2


def test_static_scales_are_written_for_a_model_with_an_mtp_layer(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_model(tmp_path / "model", "deepseek_v3", num_nextn_predict_layers=1)
    tensors = load_file(source / "model.safetensors")
    last, mtp = f"model.layers.{_LAYERS - 1}.", f"model.layers.{_LAYERS}."
    tensors |= {name.replace(last, mtp): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    tensors[f"{mtp}eh_proj.weight"] = torch.randn(64, 128, dtype=torch.bfloat16)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    data = CalibrationSet((tuple(range(20, 120)),), {"sources": []})
    for options in (RunOptions(), RunOptions(max_memory=300_000)):
        stats = calibrate(source, data, options)
        assert not [module for module in stats.inputs if module.startswith(mtp)]
    quantize_checkpoint(source, tmp_path / "out", "fp8-static", calibration=Calibration(stats, parse_rule("max")))
    output = load_file(tmp_path / "out" / "model.safetensors")
    assert f"{last}self_attn.o_proj.input_scale" in output
    assert {name for name in output if name.startswith(mtp)} == {name for name in tensors if name.startswith(mtp)}
