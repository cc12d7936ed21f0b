"""An interrupted conversion continues from its last complete shard, unless the source changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from converting import INTEROP, change_record, dequantize, interrupted, sharded, stored
from safetensors.torch import load_file, save_file

from minifloat.quantize.convert import ConvertOptions, convert_checkpoint

TARGETS = [("compressed-tensors", ConvertOptions()), (None, ConvertOptions(dequantize=True))]


@pytest.mark.parametrize("target", TARGETS)
def test_a_resumed_conversion_keeps_finished_shards_and_gives_the_same_result(
    target: tuple[str | None, ConvertOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sharded(INTEROP / "modelopt-fp8-kv", tmp_path / "model", 4)
    whole = convert_checkpoint(source, tmp_path / "whole", *target)
    interrupted(monkeypatch, 2, convert_checkpoint, source, tmp_path / "out", *target)
    assert not (tmp_path / "out").exists()
    report = convert_checkpoint(source, tmp_path / "out", *target)
    assert report.resumed_shards == 2
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")
    assert report.to_dict() == whole.to_dict()


@pytest.mark.parametrize("target", TARGETS)
def test_a_changed_source_is_converted_from_the_start_with_a_note(
    target: tuple[str | None, ConvertOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sharded(INTEROP / "modelopt-fp8-kv", tmp_path / "model", 4)
    interrupted(monkeypatch, 2, convert_checkpoint, source, tmp_path / "out", *target)
    first = min(source.glob("model-*.safetensors"))
    tensors = load_file(first)
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16)
    tensors[name] = tensors[name] * 2
    save_file(tensors, first, metadata={"format": "pt"})
    report = convert_checkpoint(source, tmp_path / "out", *target)
    assert report.resumed_shards == 0
    assert "of the source changed" in report.notes[-1]
    convert_checkpoint(source, tmp_path / "whole", *target)
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")


@pytest.mark.parametrize(
    ("keys", "value", "resumed"),
    [(["tensors"], {}, 1), (["tensors", 0, "becomes"], 3, 1), (["amax"], {}, 1), (["tensors", 0, "name"], "other", 0)],
)
def test_a_finished_shard_whose_record_is_not_one_of_this_package_is_converted_again(
    keys: list[str | int], value: object, resumed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sharded(INTEROP / "modelopt-fp8-kv", tmp_path / "model", 4)
    whole = dequantize(source, tmp_path / "whole")
    interrupted(monkeypatch, 2, convert_checkpoint, source, tmp_path / "out", options=ConvertOptions(dequantize=True))
    change_record(tmp_path / "out", keys, value)
    report = dequantize(source, tmp_path / "out")
    assert report.resumed_shards == resumed
    assert len(report.notes) == len(whole.notes) + 1
    assert report.tensors == whole.tensors
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")


def test_an_existing_folder_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    source = INTEROP / "llmc-mxfp8"
    convert_checkpoint(source, tmp_path / "out", "mxfp8")
    with pytest.raises(Exception, match="exists already"):
        convert_checkpoint(source, tmp_path / "out", "modelopt")
    convert_checkpoint(source, tmp_path / "out", "modelopt", ConvertOptions(overwrite=True))
    assert (tmp_path / "out" / "hf_quant_config.json").exists()
