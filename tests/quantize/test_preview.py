"""`preview_quantization` and `quantize --dry-run`: what `quantize` then writes, and not a byte of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from minifloat import Budget, QuantizeOptions, preview_quantization, quantize_checkpoint
from minifloat.commands.main import main
from minifloat.errors import DestinationError, UsageError

BASE = Path(__file__).parents[1] / "data" / "interop" / "base-llama"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["quantize", *map(str, arguments)])


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        (None, {}),
        ("mxfp4", {"overrides": ["down_proj=fp8", "o_proj=bf16"]}),
        ("nvfp4", {}),
        ("fp8-dynamic", {"target": "vllm:h100"}),
    ],
    ids=str,
)
def test_the_preview_is_what_quantize_writes(tmp_path: Path, scheme: str | None, options: dict[str, Any]) -> None:
    preview = preview_quantization(BASE, tmp_path / "out", scheme, QuantizeOptions(**options))
    assert list(tmp_path.iterdir()) == []
    report = quantize_checkpoint(BASE, tmp_path / "out", scheme, QuantizeOptions(**options))
    assert (preview.source_bytes, preview.output_bytes) == (report.source_bytes, report.output_bytes)
    assert preview.engines == report.engines
    assert preview.scheme == report.recipe["scheme"]
    assert preview.layout == report.recipe["layout"]
    assert set(preview.notes) <= set(report.notes)
    assert sum(tensor.quantized for tensor in preview.tensors) == report.count("quantized")
    assert {tensor.name: tensor.output_bytes for tensor in preview.tensors} == {
        tensor.name: tensor.output_bytes for tensor in report.tensors
    }


def test_the_command_prints_table_bytes_engines_and_disk_and_writes_nothing(tmp_path: Path) -> None:
    result = run(BASE, tmp_path / "out", "--dry-run", "--scheme", "mxfp4", "--exclude", "down_proj")
    assert result.exit_code == 0, result.output
    for words in ("model.layers.*.self_attn.q_proj.weight", "mxfp4", "copied (norm or bias)", "100.4 KiB -> ", "vLLM"):
        assert words in result.output
    assert result.output.splitlines()[-1].endswith("free, enough. Nothing was written (--dry-run).")
    document = json.loads(run(BASE, tmp_path / "out", "--dry-run", "--json").stdout)
    assert document["fits_on_disk"] is True
    assert len(document["tensors"]) == 12
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_said_after_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 0, 1000))  # type: ignore[attr-defined]
    result = run(BASE, tmp_path / "out", "--dry-run")
    assert result.exit_code == 2
    assert "Disk: 1000 B free, too little: " in result.output


def test_a_preview_finds_the_mistakes_that_quantize_finds_before_it_reads_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="matches no weight"):
        preview_quantization(BASE, tmp_path / "out", options=QuantizeOptions(overrides=["nothing=fp8"]))
    with pytest.raises(UsageError, match="needs calibrated scales"):
        preview_quantization(BASE, tmp_path / "out", options=QuantizeOptions(kv_cache=True))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(DestinationError, match="exists already"):
        preview_quantization(BASE, tmp_path / "full")
    with pytest.raises(UsageError, match="cannot be met"):
        preview_quantization(BASE, tmp_path / "out", options=QuantizeOptions(budget=Budget(bits=1.0)))


def test_within_a_budget_a_dry_run_says_what_the_search_takes(tmp_path: Path) -> None:
    result = run(BASE, tmp_path / "out", "--dry-run", "--max-kl", "0.1", "--data", "self")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "Sizes are those of mxfp4 everywhere, the least. The mixture within a KL divergence of 0.1 depends" in words
    assert "the damage of" in words
    assert "up to 3 more times" in words
    assert list(tmp_path.iterdir()) == []
