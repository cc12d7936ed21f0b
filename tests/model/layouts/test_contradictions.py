"""A config.json that contradicts its tensors is refused, with the field, a tensor and the cure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minifloat.deploy.check import check_checkpoint
from minifloat.deploy.estimate import plan_model
from minifloat.engine.opening import open_model
from minifloat.engine.options import EngineOptions
from minifloat.errors import ConfigError
from minifloat.evaluate.compare.transformers_model import TransformersModel
from minifloat.model.layouts.inspection import inspect_checkpoint
from minifloat.model.runtime.load import load
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.preview import preview_quantization


@pytest.fixture(scope="module")
def models(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, name) for name in ("llama", "qwen3_moe", "deepseek_v3", "qwen3_next")}


def changed(source: Path, folder: Path, **fields: Any) -> Path:
    """Return a copy of a checkpoint with other fields in its config."""
    folder.mkdir()
    shutil.copy(source / "model.safetensors", folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (
            "llama",
            {"num_hidden_layers": 3},
            "num_hidden_layers is 3, .* belongs to layer 2; .* missing shards",
        ),
        ("llama", {"num_hidden_layers": 1}, r"num_hidden_layers is 1, and model\.layers\.1\..* belongs to layer 1"),
        (
            "llama",
            {"hidden_size": 128},
            r"hidden_size is 128, and .*\.0\.input_layernorm\.weight has .*\[64\]",
        ),
        (
            "qwen3_moe",
            {"num_local_experts": 8},
            r"num_local_experts is 8, and model\.layers\.0\.mlp\.experts has 4 experts",
        ),
        (
            "deepseek_v3",
            {"n_routed_experts": 2},
            r"n_routed_experts is 2, and .*\.1\.mlp\.experts has 4 experts",
        ),
        ("qwen3_next", {"num_experts": 3}, "num_experts is 3, and .* has 4 experts"),
    ],
)
def test_sizes_that_contradict_the_tensors_are_refused(
    model: str, fields: dict[str, Any], message: str, models: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(models[model], tmp_path / "changed", **fields)
    with pytest.raises(ConfigError, match=message):
        quantize_checkpoint(folder, tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match=message):
        plan_model(folder, hardware="h100")
    with pytest.raises(ConfigError, match=message):
        check_checkpoint(folder, "vllm:h100", scheme="fp8")


READERS: dict[str, Callable[[Path, Path], Any]] = {
    "load": lambda folder, _: load(folder),
    "serve": lambda folder, _: open_model(folder, EngineOptions()),
    "inspect": lambda folder, _: inspect_checkpoint(folder),
    "check": lambda folder, _: check_checkpoint(folder, "vllm:h100"),
    "plan": lambda folder, _: plan_model(folder, hardware="h100"),
    "quantize": lambda folder, out: quantize_checkpoint(folder, out, "fp8"),
    "dry run": lambda folder, out: preview_quantization(folder, out, "fp8"),
    "compare": lambda folder, _: TransformersModel.of(folder),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("layers", [300, 16_000, 1_000_000])
@pytest.mark.parametrize("reader", READERS)
def test_layers_without_tensors_are_refused_before_anything_is_built(
    reader: str, layers: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(torch.nn.Linear, "__init__", built)
    folder = changed(models["llama"], tmp_path / "changed", num_hidden_layers=layers)
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        READERS[reader](folder, tmp_path / "out")


def test_layers_of_multi_token_prediction_contradict_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    folder = changed(models["llama"], tmp_path / "changed", **fields)
    report = quantize_checkpoint(folder, tmp_path / "out", "fp8")
    assert any("multi-token prediction" in note for note in report.notes)
    assert {tensor.name.split(".")[2] for tensor in report.quantized} == {"0"}
