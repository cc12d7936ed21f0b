"""Files of arrays: names, bytes and record come back; a damaged or forged file is refused."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from minifloat.calibration.layerwise.walk import LayerWork
from minifloat.checkpoint.array_file import ArrayContent, ArrayFormat, read_arrays, write_arrays
from minifloat.checkpoint.layout import JOURNAL_FILE
from minifloat.checkpoint.schema import any_object, exact_fields, text
from minifloat.errors import StatsError, StorageError

FORMAT = ArrayFormat("rounded layer", 1, any_object, "round it again")
ARRAYS = {
    "layers.0.q_proj.weight_packed": np.arange(37, dtype=np.uint8),
    "layers.0.q_proj.weight_scale": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3),
    "layers.0.norm.weight": np.zeros(0, np.uint8),
    "tokens": np.arange(5, dtype=np.int64),
}
CONTENT = ArrayContent(
    {"weights": [{"module": "layers.0.q_proj", "method": "gptq", "nearest_error": 0.125, "ü": None}], "folds": []},
    ARRAYS,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_arrays(tmp_path / "file", FORMAT, CONTENT)
    return tmp_path / "file"


def test_names_bytes_and_record_come_back(path: Path) -> None:
    file = read_arrays(path, FORMAT)
    assert file.names == ARRAYS.keys()
    assert file.record == CONTENT.record
    for name, array in ARRAYS.items():
        assert file.read(name).tobytes() == array.tobytes()
        np.testing.assert_array_equal(file.array(name), array)
        assert file.array(name).dtype == array.dtype
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_equal_content_gives_equal_bytes_and_digests(path: Path, tmp_path: Path) -> None:
    write_arrays(tmp_path / "again", FORMAT, CONTENT)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    write_arrays(tmp_path / "other", FORMAT, ArrayContent(CONTENT.record, ARRAYS | {"tokens": -ARRAYS["tokens"]}))
    assert read_arrays(tmp_path / "other", FORMAT).digest != read_arrays(path, FORMAT).digest


def test_a_file_without_arrays_is_its_record(tmp_path: Path) -> None:
    write_arrays(tmp_path / "file", FORMAT, ArrayContent({"held_out": {"tokens": 3}}, {}))
    file = read_arrays(tmp_path / "file", FORMAT)
    assert file.names == frozenset()
    assert file.record == {"held_out": {"tokens": 3}}


def test_with_a_flipped_bit_anywhere_a_file_is_refused(path: Path) -> None:
    original, draw = path.read_bytes(), random.Random(0)
    for position in range(len(original)):
        damaged = bytearray(original)
        damaged[position] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(StatsError):
            read_arrays(path, FORMAT)


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_file_cut_short_is_refused(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(StatsError, match=r"damaged .*round it again"):
        read_arrays(path, FORMAT)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ArrayFormat("Hessians", 1, any_object, "c"), "but no Hessians"),
        (ArrayFormat("rounded layer", 2, any_object, "c"), "version '1', this minifloat reads version '2'; c"),
        (ArrayFormat("rounded layer", 1, exact_fields({"a": text}), "c"), "not valid: record: expected the fields a"),
        (ArrayFormat("rounded layer", 1, any_object, "c", {"tokens": ("I64", 2)}), "of another dtype or rank; c"),
    ],
)
def test_a_file_of_another_kind_version_or_content_is_refused(path: Path, kind: ArrayFormat, message: str) -> None:
    with pytest.raises(StatsError, match=message):
        read_arrays(path, kind)


def test_a_folder_that_does_not_exist_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        write_arrays(tmp_path / "missing" / "file", FORMAT, CONTENT)


def test_with_a_flipped_bit_in_file_or_journal_a_layer_is_not_finished(tmp_path: Path) -> None:
    def folder() -> LayerWork:
        return LayerWork(tmp_path / "work", "fingerprint", FORMAT)

    with folder() as work:
        work.finish(0, CONTENT)
    with folder() as work:
        assert [file.record for file in work.finished] == [CONTENT.record]
    originals = {path: path.read_bytes() for path in (work.results(0), work.path / JOURNAL_FILE)}
    draw = random.Random(0)
    for file, original in originals.items():
        for position in range(0, len(original), 3):
            for path, content in originals.items():
                path.write_bytes(content)
            damaged = bytearray(original)
            damaged[position] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            with folder() as work:
                assert work.finished == []
