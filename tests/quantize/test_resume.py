"""Killed at any moment, a run leaves nothing that loads; repeated, it gives the same bytes as one never interrupted."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from converting import DELETED, change_record, interrupted

from minifloat.checkpoint import Checkpoint, rewrite
from minifloat.errors import CheckpointError
from minifloat.quantize import stream
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

Make = Callable[..., Path]

# Importing takes seconds, most of it on first use: a process quantizes once and then forks for every destination on its
# standard input. The child says its id and then a dot for every slab that it begins, so that a kill lands inside the
# work on any machine.
SERVER = """
import os, sys
from minifloat.quantize import stream
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions
source, scheme, warm_up = sys.argv[1:]
quantize_checkpoint(source, warm_up, scheme, QuantizeOptions(workers=1))
def reporting(function):
    def call(*args, **kwargs):
        os.write(1, b".")
        return function(*args, **kwargs)
    return call
stream.quantize_rows = reporting(stream.quantize_rows)
stream.SLAB_BYTES = 4096
for line in sys.stdin:
    child = os.fork()
    if not child:
        os.write(1, f"{os.getpid()}\\n".encode())
        quantize_checkpoint(source, line.strip(), scheme, QuantizeOptions(workers=2))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(1, f"\\n{status}\\n".encode())
"""


@contextmanager
def forking_server(source: Path, scheme: str, warm_up: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that quantizes `source` in a child of its own for every destination that it is sent."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}  # no threads at a fork
    command = [sys.executable, "-c", SERVER, str(source), scheme, str(warm_up)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(command, env=environment, **pipes) as server:  # type: ignore[call-overload]
        yield server


def quantize_in_child(
    server: subprocess.Popen[bytes], destination: Path, kill_after: int | None = None
) -> tuple[int, int]:
    """Quantize in a child of the server, and kill it when it has begun that many slabs."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{destination}\n".encode())
    child, slabs = int(server.stdout.readline()), 0
    while True:
        if slabs == kill_after:
            with suppress(ProcessLookupError):  # it may just have ended
                os.kill(child, signal.SIGKILL)
        if server.stdout.read(1) != b".":
            break
        slabs += 1
    return slabs, int(server.stdout.readline())


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def no_checkpoint_below(folder: Path) -> bool:
    """Whether nothing in the work folder opens as a checkpoint."""
    for candidate in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        try:
            Checkpoint.open(candidate).close()
        except CheckpointError:
            continue
        return False
    return True


@pytest.mark.parametrize("scheme", ["fp8-block", "nvfp4"])
def test_killed_at_twenty_random_moments_and_resumed_the_result_is_bit_identical(
    make_checkpoint: Make, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "SLAB_BYTES", 4096)  # as in the child: the last bits of the error sums depend on it
    source = make_checkpoint(shards=6)
    whole = tmp_path / "whole" / "out"
    whole.parent.mkdir()
    quantize_checkpoint(source, whole, scheme)
    expected = digests(whole)
    moments = random.Random(2026)
    destination = tmp_path / "out"
    finished_early = resumed = 0
    with forking_server(source, scheme, tmp_path / "warm-up") as server:
        slabs, status = quantize_in_child(server, tmp_path / "undisturbed")
        assert status == 0
        for _ in range(20):
            _, status = quantize_in_child(server, destination, moments.randint(0, slabs))
            finished_early += status == 0
            work = tmp_path / "out.minifloat-work"
            if destination.exists():
                assert digests(destination) == expected
                shutil.rmtree(destination)
            else:
                resumed += len(list((work / "output").glob("*"))) if work.exists() else 0
                assert no_checkpoint_below(work)
    report = quantize_checkpoint(source, destination, scheme)
    assert digests(destination) == expected
    assert finished_early < 20
    assert resumed or report.resumed_shards, "no kill left finished work"


def test_a_failed_run_is_resumed_and_reports_its_finished_shards(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(shards=4)
    interrupted(monkeypatch, 2, quantize_checkpoint, source, tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()
    report = quantize_checkpoint(source, tmp_path / "out", "fp8")
    assert report.resumed_shards == 2
    assert report.notes == ()


@pytest.mark.parametrize("scheme", ["fp8", "fp8-static"])
def test_a_finished_shard_with_a_flipped_bit_is_written_again_with_a_note(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    source = make_checkpoint(shards=4)
    interrupted(monkeypatch, 2, quantize_checkpoint, source, tmp_path / "out", scheme)
    shard = "model-00001-of-00004.safetensors"
    flip_last_byte(tmp_path / "out.minifloat-work" / "output" / shard)
    report = quantize_checkpoint(source, tmp_path / "out", scheme)
    assert report.resumed_shards == 1
    assert [note for note in report.notes if shard in note] == [
        f"{shard} of the earlier run was written again, because the file holds other bytes than were written: "
        "check the disk."
    ]
    quantize_checkpoint(source, tmp_path / "fresh", scheme)
    weights = [name for name in digests(tmp_path / "fresh") if name.endswith(".safetensors")]
    assert all(digests(tmp_path / "out")[name] == digests(tmp_path / "fresh")[name] for name in weights)


@pytest.mark.parametrize(
    ("keys", "value", "reason"),
    [
        (["amax"], 3, "record.amax: expected an object, found 3"),
        (["amax"], {"group": "1"}, "record.amax.group: expected a finite number of at least 0, found '1'"),
        (["amax"], DELETED, "record: expected the fields amax, tensors, found ['tensors']"),
        (["tensors"], None, "record.tensors: expected a list, found None"),
        (["tensors", 0], 7, "record.tensors[0]: expected an object, found 7"),
        (["tensors", 0, "detail"], 255, "record.tensors[0].detail: expected a string, found 255"),
        (["tensors", 0, "shape"], {}, "record.tensors[0].shape: expected a list, found {}"),
        (["tensors", 0, "source_digest"], DELETED, "record.tensors[0]: expected the fields name, action"),
        (["tensors", 0, "more"], 1, "record.tensors[0]: expected the fields name, action"),
        (["tensors", 0, "stats"], [], "record.tensors[0].stats: expected an object, found []"),
        (["tensors", 2, "stats", "signal"], "", "signal: expected a finite number of at least 0, found ''"),
        (["tensors", 2, "stats", "noise"], float("nan"), "noise: expected a finite number of at least 0, found nan"),
        (["tensors", 2, "stats", "elements"], True, "elements: expected an integer from 0 to"),
    ],
)
def test_a_finished_shard_whose_record_is_not_one_of_this_package_is_written_again(
    make_checkpoint: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: list[str | int],
    value: object,
    reason: str,
) -> None:
    source = make_checkpoint(shards=4)
    whole = quantize_checkpoint(source, tmp_path / "whole", "fp8-static")
    interrupted(monkeypatch, 2, quantize_checkpoint, source, tmp_path / "out", "fp8-static")
    shard = change_record(tmp_path / "out", keys, value)
    report = quantize_checkpoint(source, tmp_path / "out", "fp8-static")
    assert report.resumed_shards == 1
    (note,) = (note for note in report.notes if shard in note)
    assert "was written again, because the file has an unusable line in the journal" in note
    assert reason in note
    assert report.tensors == whole.tensors
    assert [path.read_bytes() for path in sorted((tmp_path / "out").glob("*.safetensors"))] == [
        path.read_bytes() for path in sorted((tmp_path / "whole").glob("*.safetensors"))
    ]


def test_a_record_of_other_tensors_than_the_source_has_starts_over(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(shards=4)
    whole = quantize_checkpoint(source, tmp_path / "whole", "fp8")
    interrupted(monkeypatch, 2, quantize_checkpoint, source, tmp_path / "out", "fp8")
    change_record(tmp_path / "out", ["tensors", 0, "name"], "another")
    report = quantize_checkpoint(source, tmp_path / "out", "fp8")
    assert report.resumed_shards == 0
    assert report.tensors == whole.tensors


@pytest.mark.parametrize("change", ["weights", "scheme", "version", "config"])
def test_a_changed_source_scheme_or_version_starts_over_with_a_note(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    source = make_checkpoint(shards=4)
    interrupted(monkeypatch, 2, quantize_checkpoint, source, tmp_path / "out", "fp8")
    scheme = "fp8"
    if change == "weights":
        flip_last_byte(source / "model-00001-of-00004.safetensors")
    elif change == "scheme":
        scheme = "mxfp8"
    elif change == "version":
        monkeypatch.setattr(rewrite, "__version__", "999")
    else:
        (source / "tokenizer_config.json").write_text('{"changed": true}')
    report = quantize_checkpoint(source, tmp_path / "out", scheme)
    assert report.resumed_shards == 0
    assert "not continued" in report.notes[-1]
    quantize_checkpoint(source, tmp_path / "fresh", scheme)
    same = [name for name in digests(tmp_path / "fresh") if name.endswith((".safetensors", "config.json"))]
    assert all(digests(tmp_path / "out")[name] == digests(tmp_path / "fresh")[name] for name in same)


def test_a_changed_shared_scale_starts_over(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Callable[[], dict[str, np.ndarray]]
) -> None:
    """The shared amax of a finished q changes when k, in an unfinished shard, changes."""
    tensors = llama()
    source = make_checkpoint(tensors=tensors, shards=4)
    interrupted(monkeypatch, 1, quantize_checkpoint, source, tmp_path / "out", "fp8-static")
    with Checkpoint.open(source) as checkpoint:
        first = {name for name, info in checkpoint.tensors.items() if info.shard == checkpoint.shards[0]}
    family = [f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in range(2) for name in "qkv"]
    later = next(
        name
        for name in family
        if name not in first and any(other in first for other in family if other[:14] == name[:14])
    )
    tensors[later] *= 8
    make_checkpoint("changed", tensors, shards=4)
    for file in (tmp_path / "changed").glob("*.safetensors"):
        shutil.copy(file, source / file.name)
    report = quantize_checkpoint(source, tmp_path / "out", "fp8-static")
    assert report.resumed_shards == 0
    quantize_checkpoint(source, tmp_path / "fresh", "fp8-static")
    weights = [name for name in digests(tmp_path / "fresh") if name.endswith(".safetensors")]
    assert all(digests(tmp_path / "out")[name] == digests(tmp_path / "fresh")[name] for name in weights)


def test_ctrl_c_keeps_the_finished_work(make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(shards=4)
    plain, calls = stream.quantize_rows, [0]

    def interrupt_late(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] == 10:
            raise KeyboardInterrupt
        return plain(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(stream, "quantize_rows", interrupt_late)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(source, tmp_path / "out", "fp8", QuantizeOptions(workers=1))
    assert quantize_checkpoint(source, tmp_path / "out", "fp8").resumed_shards >= 1


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
