"""mlx-lm's folders have the codes and scales of their source, are read back as it, and damaged ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from converting import INTEROP, edited, loaded_logits, meaning, quantization_config, stored
from safetensors.torch import load_file, save_file

from minifloat.checkpoint import Checkpoint
from minifloat.deploy.estimate.hardware import LOCAL_HARDWARE
from minifloat.errors import ConfigError, ConversionError, MinifloatError, ShapeError, UnsupportedTensorError
from minifloat.model.layouts import describe
from minifloat.quantize.convert import ConvertOptions, convert_checkpoint
from minifloat.quantize.convert.mlx_plan import with_older_names
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

MakeModel = Callable[..., Path]
BASE = INTEROP / "base-llama"
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
LAYER = "model.layers.0.mlp"
IDS = torch.arange(3, 19)[None]
CODES = f"{LAYER}.down_proj.weight"
SCALES = f"{LAYER}.down_proj.scales"


def to_mlx(folder: Path, source: Path, scheme: str, *overrides: str, **options: Any) -> Path:
    """Quantize a model into ``folder / "q"``, and convert that into the folder that is returned."""
    quantize_checkpoint(source, folder / "q", scheme, QuantizeOptions(overrides=overrides, allow_partial=True))
    report = convert_checkpoint(folder / "q", folder / "m", "mlx", ConvertOptions(**options))
    assert next(verdict.loads for verdict in report.engines if verdict.engine == "mlx") == tuple(LOCAL_HARDWARE)
    return folder / "m"


def test_codes_and_scales_are_moved_and_move_back_bit_for_bit(tmp_path: Path) -> None:
    folder = to_mlx(tmp_path, BASE, "mxfp4", "o_proj=mxfp8", "down_proj=bf16")
    assert meaning(folder) == meaning(tmp_path / "q")
    tensors, source = load_file(folder / "model.safetensors"), load_file(tmp_path / "q" / "model.safetensors")
    codes = f"{LAYER}.up_proj.weight"
    assert tensors[codes].dtype == torch.uint32
    assert torch.equal(tensors[codes].view(torch.uint8), source[f"{codes}_packed"])
    config = quantization_config(folder)
    assert config == json.loads((folder / "config.json").read_text())["quantization"]
    assert MXFP4.items() <= config.items()
    assert config["model.layers.0.self_attn.o_proj"] == {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    assert config[f"{LAYER}.down_proj"] is False
    assert "model.layers.0.self_attn.q_proj" not in config
    convert_checkpoint(folder, tmp_path / "back", "compressed-tensors")
    assert stored(tmp_path / "back") == stored(tmp_path / "q")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_stacked_and_read_back_as_the_same_model(
    family: str, make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_model(tmp_path / "s", family)
    folder = to_mlx(tmp_path, source, "mxfp4")
    with Checkpoint.open(folder) as checkpoint, Checkpoint.open(tmp_path / "q") as quantized:
        assert describe(checkpoint).weights.keys() == describe(quantized).weights.keys()
        stacks = [name for name in checkpoint.tensors if ".switch_mlp." in name]
        assert {name.rpartition(".switch_mlp.")[2] for name in stacks} == {
            f"{linear}.{leaf}" for linear in ("gate_proj", "up_proj", "down_proj") for leaf in ("weight", "scales")
        }
        assert not any(".experts." in name for name in checkpoint.tensors)
    assert torch.equal(*(loaded_logits(path, IDS) for path in (folder, tmp_path / "q")))
    with pytest.raises(ConversionError, match="stacks of experts in mlx's layout are not taken apart"):
        convert_checkpoint(folder, tmp_path / "back", "compressed-tensors")


def test_experts_of_which_some_are_plain_are_refused(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model(tmp_path / "s", "qwen3_moe")
    with pytest.raises(ConversionError, match=r"layers\.0\.mlp\.experts\.0.*is BF16.*quantize all of them alike"):
        to_mlx(tmp_path, source, "mxfp4", r"layers\.0\.mlp\.experts=bf16")


def test_the_tensor_scale_of_nvfp4_goes_into_the_block_scales(make_llama: MakeModel, tmp_path: Path) -> None:
    source = make_llama(tmp_path / "s")
    with pytest.raises(
        ConversionError, match=r"no tensor scale in nvfp4, and \d+ of \d+ block scales.*--allow-rounding"
    ):
        to_mlx(tmp_path, source, "nvfp4")
    report = convert_checkpoint(tmp_path / "q", tmp_path / "m", "mlx", ConvertOptions(allow_rounding=True))
    found, before = load_file(tmp_path / "m" / "model.safetensors"), load_file(tmp_path / "q" / "model.safetensors")
    rounded = 0
    for name, scale in before.items():
        if name.endswith(".weight_scale"):
            module = name.removesuffix(".weight_scale")
            products = scale.float() / before[f"{module}.weight_global_scale"]
            nearest = products.to(torch.float8_e4m3fn)
            assert torch.equal(found[f"{module}.scales"], nearest.view(torch.uint8))
            rounded += int((nearest.float() != products).sum())
    assert report.rounding.scales == rounded > 0
    assert any("block scales are rounded" in note for note in report.notes)


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**20])
def test_a_weight_that_would_be_lost_without_its_tensor_scale_is_refused(
    make_llama: MakeModel, tmp_path: Path, factor: float
) -> None:
    small = f"{LAYER}.down_proj.weight"
    source = edited(make_llama(tmp_path / "s"), tmp_path / "e", tensors=lambda t: t | {small: t[small] * factor})
    quantize_checkpoint(source, tmp_path / "q", "nvfp4")
    with pytest.raises(ConversionError, match=r"layers\.0\.mlp\.down_proj\.weight_scale.*outside of E4M3.*mxfp4"):
        convert_checkpoint(tmp_path / "q", tmp_path / "m", "mlx", ConvertOptions(allow_rounding=True))
    assert not (tmp_path / "m").exists()


def test_a_tensor_scale_that_all_block_scales_can_take_is_exact(make_llama: MakeModel, tmp_path: Path) -> None:
    quantize_checkpoint(make_llama(tmp_path / "s"), tmp_path / "q", "nvfp4")

    def eight(tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        normal = torch.tensor(8.0).to(torch.float8_e4m3fn)
        changed = {name: normal.expand_as(t).clone() for name, t in tensors.items() if name.endswith("weight_scale")}
        changed |= {n: torch.full_like(t, 16.0) for n, t in tensors.items() if n.endswith("weight_global_scale")}
        return tensors | changed

    source = edited(tmp_path / "q", tmp_path / "e", tensors=eight)
    report = convert_checkpoint(source, tmp_path / "m", "mlx")
    assert report.rounding.scales == 0
    assert meaning(tmp_path / "m") == meaning(source)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("fp8-dynamic", "mlx has no mode for 'fp8-dynamic', only for mxfp4, nvfp4, mxfp8.*--dequantize"),
        ("mxfp4-w4a4", "has inputs in 16 bits.*--scheme mxfp4"),
    ],
)
def test_formats_without_a_mode_are_refused_with_the_cure(scheme: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=message):
        to_mlx(tmp_path, BASE, scheme)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [("llmc-fp8-kv", "mlx-lm keeps both in 16 bits"), ("gpt-oss-mxfp4", "loads gpt-oss in the layout")],
)
def test_what_mlx_cannot_hold_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=message):
        convert_checkpoint(INTEROP / name, tmp_path / "out", "mlx")


def test_types_that_mlx_lm_was_not_run_on_are_refused(make_llama: MakeModel, tmp_path: Path) -> None:
    quantize_checkpoint(make_llama(tmp_path / "s"), tmp_path / "q", "mxfp4")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    (tmp_path / "q" / "config.json").write_text(json.dumps(config | {"model_type": "arcee"}))
    with pytest.raises(ConversionError, match="'arcee' was not run in mlx-lm"):
        convert_checkpoint(tmp_path / "q", tmp_path / "m", "mlx")


Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("tensors", "config", "error", "message"),
    [
        (lambda t: t | {SCALES.replace("scales", "biases"): t[SCALES].half()}, {}, UnsupportedTensorError, "affine"),
        (lambda t: t | {SCALES: t[SCALES].half()}, {}, UnsupportedTensorError, "affine"),
        (lambda t: {n: v for n, v in t.items() if n != CODES}, {}, ShapeError, "found none"),
        (lambda t: t | {CODES: t[CODES].view(torch.uint8)}, {}, ShapeError, "found U8"),
        (lambda t: t | {SCALES: t[SCALES][:-1].clone()}, {}, ShapeError, "do not fit codes"),
        (lambda t: t | {SCALES: t[SCALES][:, :1].clone()}, {}, ShapeError, "do not fit codes"),
        (lambda t: t | {SCALES: t[SCALES][:, :0].clone()}, {}, ShapeError, "do not fit codes"),
        (lambda t: t | {f"{LAYER}.down_proj.global_scale": torch.ones(1)}, {}, UnsupportedTensorError, "tensor scales"),
        (lambda t: t, {f"{LAYER}.down_proj": False}, ConfigError, "is declared False"),
        (lambda t: t, {f"{LAYER}.down_proj": {**MXFP4, "mode": "nvfp4"}}, ConfigError, "is declared"),
        (lambda t: {n: v for n, v in t.items() if v.dtype != torch.uint8}, {}, ConfigError, "no tensor is named"),
    ],
)
def test_damaged_folders_are_refused_by_name(
    tensors: Callable[[Tensors], Tensors],
    config: dict[str, Any],
    error: type[MinifloatError],
    message: str,
    tmp_path: Path,
) -> None:
    folder = to_mlx(tmp_path, BASE, "mxfp4")
    path = folder / "model.safetensors"
    save_file(tensors(load_file(path)), path, metadata={"format": "pt"})
    whole = json.loads((folder / "config.json").read_text())
    whole["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(whole))
    with Checkpoint.open(folder) as checkpoint, pytest.raises(error, match=message):
        describe(checkpoint)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_theta": 5e5, "rope_type": "default"}, {"rope_theta": 5e5, "rope_scaling": None}),
        (
            {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0},
            {
                "rope_theta": 5e5,
                "rope_scaling": {"rope_theta": 5e5, "rope_type": "llama3", "type": "llama3", "factor": 8.0},
            },
        ),
    ],
)
def test_the_rotary_embedding_is_stated_as_mlx_lm_reads_it(rope: dict[str, Any], expected: dict[str, Any]) -> None:
    config = {"model_type": "llama", "rope_parameters": rope}
    assert with_older_names(config) == config | expected
