"""Tests that kill a writer with SIGKILL at every system call that changes the disk, then resume.

A process killed by SIGKILL loses no written data, so `fsync` is replaced by a function that does nothing, which keeps
the tests fast; a call of it still counts as a point to kill at.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors

from minifloat.checkpoint import Checkpoint, CheckpointWriter, OutputTensor, encode_index
from minifloat.errors import CheckpointError, DestinationError

SHARDS = {
    f"model-{i}.safetensors": [OutputTensor(f"w{i}", "F8_E4M3", (64, 33)), OutputTensor(f"s{i}", "F32", (64, 1))]
    for i in range(3)
}
#: All calls by which the package changes the disk.
CALLS = [
    (os, "open"),
    (os, "pwrite"),
    (os, "posix_fallocate"),
    (os, "ftruncate"),
    (os, "fsync"),
    (os, "unlink"),
    (os, "rmdir"),
    (os, "mkdir"),
    (os, "rename"),
]


def run(destination, *, overwrite=False):
    """Write a whole checkpoint as a quantizer does, with bytes that depend on the tensor names only."""
    with CheckpointWriter(destination, fingerprint="f", total_bytes=1, overwrite=overwrite) as writer:
        for name, tensors in SHARDS.items():
            if name in writer.finished:
                continue
            shard = writer.shard(name, tensors, {"format": "pt"})
            for tensor in tensors:
                data = np.random.default_rng(list(tensor.name.encode())).integers(0, 256, tensor.nbytes, dtype=np.uint8)
                half = tensor.nbytes // 2
                shard.write(tensor.name, data[half:], half)
                shard.write(tensor.name, data[:half])
            shard.commit({"name": name})
        writer.write_file("model.safetensors.index.json", encode_index(SHARDS))
        writer.write_file("config.json", b'{"model_type": "llama"}')
        writer.write_file("tokenizer.json", b"{}")
        writer.commit()


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The files that an uninterrupted run writes."""
    destination = tmp_path_factory.mktemp("uninterrupted") / "out"
    run(destination)
    return contents(destination)


def in_child(work):
    """Run `work` in a child process; return the process id."""
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            work()
        finally:
            os._exit(0)
    return child


def killed(status):
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def die_at(moment):
    """Make this process kill itself at call number `moment` that changes the disk; a write is first cut in half."""
    count = 0

    def wrap(owner, name):
        original = getattr(owner, name)

        def call(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == moment:
                if name == "pwrite":
                    descriptor, data, at = arguments
                    original(descriptor, bytes(data[: len(data) // 2]), at)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **keywords)

        setattr(owner, name, call)

    for owner, name in CALLS:
        if hasattr(owner, name):
            wrap(owner, name)


def serve():
    """Run and kill one child process per line of JSON on standard input, and print the exit status of the child.

    Forking this small process takes a tenth of the time of forking pytest with all its imports.
    """
    os.fsync = lambda _: None
    for line in sys.stdin:
        command = json.loads(line)

        def work(command=command):
            die_at(command["moment"])
            run(Path(command["destination"]), overwrite=command["overwrite"])

        _, status = os.waitpid(in_child(work), 0)
        print(status, flush=True)


@pytest.fixture(scope="module")
def run_and_die():
    """A function ``(moment, destination, overwrite=False)``: run a child killed at `moment` and return its status."""
    here = Path(__file__)
    program = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {here.stem}; {here.stem}.serve()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as server:

        def run_child(moment, destination, overwrite=False):
            command = {"moment": moment, "destination": str(destination), "overwrite": overwrite}
            server.stdin.write(json.dumps(command) + "\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        yield run_child


def check_nothing_partial_loads(destination, expected, old=None):
    """Check after a kill that the destination is complete or absent and no work folder opens as a model."""
    if destination.exists():
        assert contents(destination) in (expected, old)
        Checkpoint.open(destination).close()
    work = destination.with_name(destination.name + ".minifloat-work")
    for folder in (work, work / "output", work / "pending", work / "replaced"):
        with pytest.raises(CheckpointError):
            Checkpoint.open(folder)
    for path in work.glob("output/*.safetensors"):
        with contextlib.suppress(safetensors.SafetensorError):
            safetensors.safe_open(path, "np")
            assert path.read_bytes() == expected[path.name]
    if (work / "output" / "config.json").exists():
        assert contents(work / "output").items() <= expected.items()
        assert {"model.safetensors.index.json", *SHARDS} <= contents(work / "output").keys()


def test_a_run_killed_at_any_call_and_resumed_is_bit_identical(tmp_path, expected, run_and_die):
    for moment in range(1, 1000):
        destination = tmp_path / str(moment) / "out"
        destination.parent.mkdir()
        status = run_and_die(moment, destination)
        check_nothing_partial_loads(destination, expected)
        if not destination.exists():
            run(destination)
        assert contents(destination) == expected
        if not killed(status):
            break
    assert moment > 60
    assert names(destination.parent) == ["out"]


def test_a_run_killed_twice_and_resumed_is_bit_identical(tmp_path, expected, run_and_die):
    """Kill the writer again while it recovers from the first kill."""
    rng = random.Random(7)
    for case in range(30):
        destination = tmp_path / str(case) / "out"
        destination.parent.mkdir()
        for moment in (rng.randint(20, 110), rng.randint(1, 60), rng.randint(1, 60)):
            if not destination.exists():
                run_and_die(moment, destination)
            check_nothing_partial_loads(destination, expected)
        if not destination.exists():
            run(destination)
        assert contents(destination) == expected


def test_after_a_killed_overwrite_the_next_run_finds_the_old_or_the_new_checkpoint(tmp_path, expected, run_and_die):
    absent = 0
    for moment in range(1, 1000):
        destination = tmp_path / str(moment) / "out"
        destination.parent.mkdir()
        run(destination)
        (destination / "config.json").write_bytes(b'{"old": 1}')
        old = contents(destination)
        status = run_and_die(moment, destination, overwrite=True)
        check_nothing_partial_loads(destination, expected, old)
        absent += not destination.exists()
        with pytest.raises(DestinationError):  # a refused run still restores the old checkpoint
            run(destination)
        assert contents(destination) in (expected, old)
        run(destination, overwrite=True)
        assert contents(destination) == expected
        assert names(destination.parent) == ["out"]
        if not killed(status):
            break
    assert absent == 1  # only between the two renames is there no destination


def test_a_killed_writer_releases_its_lock(tmp_path):
    def work():
        CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1)
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(in_child(work), 0)
    CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1).close()
    assert names(tmp_path) == []
