"""GGUF files: killed at any moment and run again, a conversion gives the bytes of one that was never disturbed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from minifloat.checkpoint import Checkpoint
from minifloat.errors import CheckpointError, DestinationError, StorageError
from minifloat.model.layouts.gguf.reading import GgufCheckpoint
from minifloat.model.layouts.inspection import inspect_checkpoint
from minifloat.quantize.convert import ConvertOptions, ConvertReport, GgufOptions, convert_checkpoint, gguf_parts
from minifloat.quantize.stream import copy_digest

MakeModel = Callable[..., Path]
SIZES = [None, 50_000]
KILLED = """
import os, signal, sys
from minifloat.quantize.convert import GgufOptions, convert_checkpoint, gguf_parts
source, out, size, after = sys.argv[1:]
gguf_parts.STEP_BYTES, plain = 20_000, gguf_parts.PartsWriter.add
def add(self, *arguments):
    plain(self, *arguments)
    if self.done == int(after):
        os.kill(os.getpid(), signal.SIGKILL)
gguf_parts.PartsWriter.add = add
convert_checkpoint(source, out, "gguf", gguf=GgufOptions(max_size=int(size) or None))
"""


@pytest.fixture(scope="module")
def source(make_llama: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("gguf") / "m")


def _convert(source: Path, folder: Path, size: int | None, *, overwrite: bool = False) -> ConvertReport:
    options = ConvertOptions(overwrite=overwrite)
    return convert_checkpoint(source, folder / "m.gguf", "gguf", options, gguf=GgufOptions(max_size=size))


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _interrupted(source: Path, folder: Path, size: int | None, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Fail as on a full disk after a number of records."""
    folder.mkdir()
    with monkeypatch.context() as patched:
        records, plain = [0], gguf_parts.PartsWriter._record

        def record(self: gguf_parts.PartsWriter) -> None:
            if records[0] == after:
                raise StorageError("disk full")
            plain(self)
            records[0] += 1

        patched.setattr(gguf_parts, "STEP_BYTES", 20_000)
        patched.setattr(gguf_parts.PartsWriter, "_record", record)
        with pytest.raises(StorageError):
            _convert(source, folder, size)


@pytest.mark.parametrize("size", SIZES)
def test_a_killed_conversion_goes_on_and_gives_the_same_bytes(source: Path, tmp_path: Path, size: int | None) -> None:
    (tmp_path / "whole").mkdir()
    whole = _convert(source, tmp_path / "whole", size)
    (tmp_path / "out").mkdir()
    arguments = [str(source), str(tmp_path / "out" / "m.gguf"), str(size or 0), "9"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not any(path.suffix == ".gguf" for path in (tmp_path / "out").iterdir())
    report = _convert(source, tmp_path / "out", size)
    assert 0 < report.resumed_shards <= 9
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")
    assert report.to_dict() == whole.to_dict()
    with Checkpoint.open(source) as checkpoint:  # though each tensor was read once
        expected = {name: copy_digest(checkpoint, info) for name, info in checkpoint.tensors.items()}
    assert {tensor.name: tensor.source_digest for tensor in report.tensors} == expected


@pytest.mark.parametrize("size", SIZES)
def test_what_is_damaged_or_of_another_source_is_written_again(
    source: Path, make_llama: MakeModel, tmp_path: Path, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _interrupted(source, tmp_path / "out", size, monkeypatch, 2)
    written = min((tmp_path / "out").glob("*.minifloat-work/output/*"))
    data = bytearray(written.read_bytes())
    data[-100_000 if size is None else -100] ^= 1
    written.write_bytes(data)
    report = _convert(source, tmp_path / "out", size)
    assert (report.resumed_shards, report.notes[-1].endswith("check the disk.")) == (0, True)
    (tmp_path / "whole").mkdir()
    _convert(source, tmp_path / "whole", size)
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")
    other = make_llama(tmp_path / "m", seed=1)
    _interrupted(other, tmp_path / "changed", size, monkeypatch, 2)
    (other / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    assert "of the source changed" in _convert(other, tmp_path / "changed", size).notes[-1]
    assert _files(tmp_path / "changed") == _files(tmp_path / "whole")


def test_files_that_are_moved_already_are_not_written_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, moved = os.rename, []

    def rename(name: str, target: Path, **folders: int) -> None:
        if len(moved) == 2:
            raise OSError(5, "no")
        plain(name, target, **folders)
        moved.append(target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename)
        with pytest.raises(StorageError, match="put the finished file in place"):
            _convert(source, tmp_path, 50_000)
    assert not list(tmp_path.glob("m-00001-of-*.gguf"))
    with Checkpoint.open(source) as checkpoint:
        count = len(checkpoint.tensors)
    assert _convert(source, tmp_path, 50_000).resumed_shards == count
    assert {path.suffix for path in tmp_path.iterdir()} == {".gguf"}
    with pytest.raises(DestinationError, match=r"m-00001-of-\d+\.gguf exists"):
        _convert(source, tmp_path, 50_000)


def test_parts_have_llama_cpp_s_names_and_read_as_one_file(source: Path, tmp_path: Path) -> None:
    first = Path(_convert(source, tmp_path, 50_000).destination)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == [f"m-{at + 1:05}-of-{len(paths):05}.gguf" for at in range(len(paths))]
    assert (first, len(paths) > 2) == (paths[0], True)
    fields = [{name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()} for path in paths]
    count = len(inspect_checkpoint(first).rows)
    assert [(part["split.no"], part["split.count"], part["split.tensors.count"]) for part in fields] == [
        (at, len(paths), count) for at in range(len(paths))
    ]
    assert inspect_checkpoint(first).shards == len(paths)
    with Checkpoint.open(source) as base:
        read = GgufCheckpoint(first, base)
        assert read.tensors.keys() == base.tensors.keys()
    with pytest.raises(CheckpointError, match="give the first, named NAME-00001-of-"):
        inspect_checkpoint(paths[1])
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(CheckpointError, match="not part 3 of"):
        inspect_checkpoint(first)
    paths[2].unlink()
    with pytest.raises(CheckpointError, match=re.escape(paths[2].name)):
        inspect_checkpoint(first)
