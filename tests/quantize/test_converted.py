"""`quantize --layout gguf` and `mlx` write what a conversion of the checkpoint writes, and leave nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from converting import interrupted, sharded

from minifloat.calibration.options import TextOptions
from minifloat.errors import DestinationError, MinifloatError, UsageError
from minifloat.model.layouts.inspection import inspect_checkpoint
from minifloat.quantize.convert import convert_checkpoint
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
        ("mlx", "nvfp4", {}, "mlx has no tensor scale"),
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
