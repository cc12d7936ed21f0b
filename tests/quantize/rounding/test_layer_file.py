"""The results of a layer in a file: names, bytes and record come back; a damaged file is refused."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from minifloat.calibration.layerwise.work_folder import LayerWork
from minifloat.checkpoint.layout import JOURNAL_FILE
from minifloat.errors import CheckpointError, StorageError
from minifloat.quantize.rounding.layer_file import LayerFile, LayerResult, read_layer, write_layer

RESULT = LayerResult(
    {
        "layers.0.q_proj.weight_packed": np.arange(37, dtype=np.uint8),
        "layers.0.q_proj.weight_scale": np.arange(200, 210, dtype=np.uint8),
        "layers.0.norm.weight": np.zeros(0, np.uint8),
    },
    {"weights": [{"module": "layers.0.q_proj", "method": "gptq", "nearest_error": 0.125, "ü": None}], "folds": []},
)


def test_names_bytes_and_record_come_back(tmp_path: Path) -> None:
    write_layer(RESULT, tmp_path / "layer-0.safetensors")
    file = read_layer(tmp_path / "layer-0.safetensors")
    assert file.names == RESULT.tensors.keys()
    assert file.record == RESULT.record
    for name, data in RESULT.tensors.items():
        assert file.read(name).dtype == np.uint8
        assert file.read(name).tobytes() == data.tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["layer-0.safetensors"]


def test_a_layer_without_tensors_is_its_record(tmp_path: Path) -> None:
    write_layer(LayerResult({}, {"held_out": {"tokens": 3}}), tmp_path / "file")
    file = read_layer(tmp_path / "file")
    assert file.names == frozenset()
    assert file.record == {"held_out": {"tokens": 3}}


def test_with_a_flipped_bit_anywhere_a_layer_is_not_finished(tmp_path: Path) -> None:
    def folder() -> LayerWork[LayerFile | LayerResult]:
        return LayerWork(tmp_path / "work", "fingerprint", read_layer, write_layer)

    with folder() as work:
        work.finish(0, RESULT)
    with folder() as work:
        assert [result.record for result in work.finished] == [RESULT.record]
    originals = {path: path.read_bytes() for path in (work.results(0), work.path / JOURNAL_FILE)}
    draw = random.Random(0)
    for file, original in originals.items():
        for position in range(len(original)):
            for path, content in originals.items():
                path.write_bytes(content)
            damaged = bytearray(original)
            damaged[position] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            with folder() as work:
                assert work.finished == []


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_file_cut_short_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "layer-0.safetensors"
    write_layer(RESULT, path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError):
        read_layer(path)


def test_a_folder_that_does_not_exist_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        write_layer(RESULT, tmp_path / "missing" / "layer-0.safetensors")
