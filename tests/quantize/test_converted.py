"""`quantize --layout gguf` and `mlx` write what a conversion of the checkpoint writes, and leave nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from converting import edited, interrupted, sharded
from safetensors.torch import load_file

from minifloat.calibration.options import TextOptions
from minifloat.checkpoint import Checkpoint
from minifloat.errors import ConversionError, DestinationError, MinifloatError, UsageError
from minifloat.model.layouts import describe
from minifloat.model.layouts.inspection import inspect_checkpoint
from minifloat.model.layouts.reading import read_rows, widen
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import quantize_tensor
from minifloat.quantize.convert import ConvertOptions, convert_checkpoint
from minifloat.quantize.data import DataOptions
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import Budget, GgufOptions, QuantizeOptions
from minifloat.quantize.preview import preview_quantization

MakeModel = Callable[..., Path]
WEIGHTS = {"gguf": "model-MXFP4.gguf", "mlx": "model-00001-of-00003.safetensors"}


@pytest.fixture
def source(make_llama: MakeModel, tmp_path: Path) -> Path:
    plain = make_llama(tmp_path / "plain", hidden_size=64)
    return sharded(plain, tmp_path / "model", 3)


@pytest.mark.parametrize("layout", WEIGHTS)
def test_the_output_is_that_of_quantize_and_convert(
    source: Path, tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two").mkdir()
    quantize_checkpoint(source, tmp_path / "two" / "model", "mxfp4")
    convert_checkpoint(tmp_path / "two" / "model", tmp_path / "expected", layout)
    before = {path.name for path in tmp_path.iterdir()}
    options = QuantizeOptions(layout=layout)
    preview = preview_quantization(source, tmp_path / "out", "mxfp4", options)
    assert (preview.layout, preview.disk_bytes) == (layout, 2 * preview.output_bytes)
    interrupted(monkeypatch, 2, quantize_checkpoint, source, tmp_path / "out", "mxfp4", options)
    assert not (tmp_path / "out").exists()
    report = quantize_checkpoint(source, tmp_path / "out", "mxfp4", options)
    assert report.resumed_shards == 2
    assert {path.name for path in tmp_path.iterdir()} == {*before, "out"}
    names = {path.name for path in (tmp_path / "expected").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in names - {"README.md", "minifloat.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes(), name
    assert WEIGHTS[layout] in names
    assert Path(report.destination).exists()


def test_a_failed_conversion_goes_on_from_the_whole_checkpoint(source: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(layout="gguf", gguf=GgufOptions(embedding="q8_0"))
    out = tmp_path / "out"
    out.mkdir()
    (out / WEIGHTS["gguf"]).write_bytes(b"mine")
    with pytest.raises(DestinationError, match="--overwrite"):
        quantize_checkpoint(source, out, "mxfp4", options)
    (out / WEIGHTS["gguf"]).unlink()
    assert quantize_checkpoint(source, out, "mxfp4", options).resumed_shards == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "plain"]


@pytest.mark.parametrize(
    ("layout", "scheme", "options", "message"),
    [
        ("gguf", None, {}, "--layout gguf: give a --scheme"),
        ("mlx", "fp8", {}, "mlx has no mode for 'fp8'"),
        ("gguf", "mxfp4", {"kv_cache": True}, "--kv-cache: llama.cpp reads no scales"),
        ("mlx", "mxfp4", {"target": "vllm:h100"}, "--target: --layout mlx is for mlx alone"),
        ("gguf", "nvfp4", {"overrides": ["o_proj=mxfp4"]}, "gguf-blocks"),
        ("gguf", "mxfp4", {"gguf": GgufOptions(pre_tokenizer="none")}, "unknown pre-tokenizer 'none'"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused_before_anything_is_written(
    make_llama: MakeModel, tmp_path: Path, layout: str, scheme: str | None, options: dict[str, Any], message: str
) -> None:
    source = make_llama(tmp_path / "model")  # 96 columns
    with pytest.raises(UsageError, match=message):
        quantize_checkpoint(source, tmp_path / "out", scheme, QuantizeOptions(layout=layout, **options))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("layout", "message"), [("gguf", "no GGUF is written of it"), ("mlx", "not run in mlx-lm")])
def test_a_model_that_the_engine_does_not_know_is_refused(
    make_model: MakeModel, tmp_path: Path, layout: str, message: str
) -> None:
    source = make_model(tmp_path / "model", "deepseek_v3")
    with pytest.raises(MinifloatError, match=message):
        quantize_checkpoint(source, tmp_path / "out", "mxfp4", QuantizeOptions(layout=layout))


@pytest.mark.parametrize("layout", WEIGHTS)
@pytest.mark.parametrize("own_text", [True, False])
def test_codes_chosen_with_data_are_those_of_quantize_and_convert(
    source: Path, tmp_path: Path, layout: str, own_text: bool
) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)
    (tmp_path / "two").mkdir()
    text = DataOptions(["self" if own_text else tmp_path / "text.txt"], TextOptions(samples=60, seq_len=32))
    quantize_checkpoint(source, tmp_path / "two" / "model", "mxfp4", data=text)
    convert_checkpoint(tmp_path / "two" / "model", tmp_path / "expected", layout)
    out = tmp_path / "out"
    report = quantize_checkpoint(source, out, "mxfp4", QuantizeOptions(layout=layout), data=text)
    assert report.rounding is not None
    for path in (tmp_path / "expected").iterdir():
        assert path.name == "README.md" or (out / path.name).read_bytes() == path.read_bytes(), path.name
    nearest = tmp_path / "nearest"
    quantize_checkpoint(source, nearest, "mxfp4", QuantizeOptions(layout=layout))
    assert (nearest / WEIGHTS[layout]).read_bytes() != (out / WEIGHTS[layout]).read_bytes()
    card = (out / "README.md").read_text()
    assert "held-out KL" in card
    assert "minifloat.json has" not in card


def test_a_budget_of_a_gguf_file_mixes_what_the_file_holds_exactly(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)
    text = DataOptions([tmp_path / "text.txt"], TextOptions(samples=60, seq_len=32))
    options = QuantizeOptions(layout="gguf", budget=Budget(bits=9.0))
    quantize_checkpoint(source, tmp_path / "m.gguf", options=options, data=text)
    layers = [row for row in inspect_checkpoint(tmp_path / "m.gguf").rows if row.name.startswith("blk.")]
    assert "BF16" in {row.format for row in layers} <= {"BF16", "MXFP4", "NVFP4", "F32"}
    weights = [row for row in layers if len(row.shape) > 1]
    assert 8 * sum(row.nbytes for row in weights) <= 9.0 * sum(row.elements for row in weights)
    with pytest.raises(UsageError, match="fp8: GGUF has no type for it"):
        quantize_checkpoint(source, tmp_path / "x.gguf", "fp8", options, data=text)
    with pytest.raises(UsageError, match="nvfp4: mlx has no tensor scale"):
        quantize_checkpoint(source, tmp_path / "x", "nvfp4", replace(options, layout="mlx"), data=text)


def test_nvfp4_for_mlx_has_block_scales_alone_and_loses_less_than_rounded_ones(
    make_llama: MakeModel, tmp_path: Path
) -> None:
    source = make_llama(tmp_path / "model", initializer_range=0.02)  # most products are subnormal in E4M3
    quantize_checkpoint(source, tmp_path / "quantized", "nvfp4")
    convert_checkpoint(tmp_path / "quantized", tmp_path / "rounded", "mlx", ConvertOptions(allow_rounding=True))
    options = QuantizeOptions(layout="mlx")
    report = quantize_checkpoint(source, tmp_path / "direct", "nvfp4", options)
    assert not any("rounded" in note for note in report.notes)
    again = replace(options, from_quantized=True)  # its scales have another one above them: the values are cast anew
    quantize_checkpoint(tmp_path / "quantized", tmp_path / "again", "nvfp4", again)
    errors = {}
    with Checkpoint.open(source) as plain:
        for name in ("quantized", "direct", "rounded", "again"):
            with Checkpoint.open(tmp_path / name) as stored:
                squares = [
                    np.square(read_rows(stored, weight, 0, weight.shape[0]) - exact).sum()
                    for module, weight in describe(stored).weights.items()
                    for exact in [widen(plain.read(f"{module}.weight"), "BF16").reshape(weight.shape)]
                ]
                errors[name] = float(sum(squares))
    assert errors["quantized"] < errors["direct"] < errors["rounded"]
    assert errors["direct"] < errors["again"] < 2 * errors["rounded"]
    found = load_file(tmp_path / "direct" / "model.safetensors")
    for name, tensor in load_file(source / "model.safetensors").items():
        if f"{name.removesuffix('.weight')}.scales" in found:
            spec = replace(SCHEMES["nvfp4"].weight, scaled_globally=False)
            scales = quantize_tensor(tensor.float(), spec).scale
            assert torch.equal(found[f"{name.removesuffix('.weight')}.scales"], scales)


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**20])
def test_a_weight_that_block_scales_alone_do_not_hold_is_refused(
    make_llama: MakeModel, tmp_path: Path, factor: float
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    source = edited(make_llama(tmp_path / "s"), tmp_path / "e", tensors=lambda t: t | {name: t[name] * factor})
    with pytest.raises(ConversionError, match=r"layers\.1\.mlp\.down_proj.*no tensor scale \(SQNR .*--override"):
        quantize_checkpoint(source, tmp_path / "out", "nvfp4", QuantizeOptions(layout="mlx"))
    assert not (tmp_path / "out").exists()
    kept = QuantizeOptions(layout="mlx", overrides=[r"layers\.1\.mlp\.down_proj=mxfp4"])
    quantize_checkpoint(source, tmp_path / "out", "nvfp4", kept)
