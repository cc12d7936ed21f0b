"""Killed with SIGKILL at every system call that changes the disk, and at random moments; then resumed.

SIGKILL loses nothing that was written, only what was not: so `fsync` counts as a moment to die but syncs nothing here,
which keeps the tests fast.
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
#: Every call by which the package changes the disk.
CALLS = [
    (os, "open"),
    (os, "pwrite"),
    (os, "posix_fallocate"),
    (os, "ftruncate"),
    (os, "fsync"),
    (os, "unlink"),
    (os, "rmdir"),
    (Path, "mkdir"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "unlink"),
    (Path, "rmdir"),
]


def run(destination, *, overwrite=False, between_writes=lambda: None):
    """A whole run: what a quantizer does, with bytes that depend on the names alone."""
    with CheckpointWriter(destination, fingerprint="f", total_bytes=1, overwrite=overwrite) as writer:
        for name, tensors in SHARDS.items():
            if name in writer.finished:
                continue
            shard = writer.shard(name, tensors, {"format": "pt"})
            for tensor in tensors:
                data = np.random.default_rng(list(tensor.name.encode())).integers(0, 256, tensor.nbytes, dtype=np.uint8)
                half = tensor.nbytes // 2
                shard.write(tensor.name, data[half:], half)
                between_writes()
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
    """What an uninterrupted run writes."""
    destination = tmp_path_factory.mktemp("uninterrupted") / "out"
    run(destination)
    return contents(destination)


def in_child(work):
    """Start `work` in a child process that does nothing else; returns its id."""
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
    """Make this process kill itself at the `moment`-th call that changes the disk; a write is cut in half first."""
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
    """For every line of JSON on standard input, run in a child that dies at a moment, and print the child's status.

    Forking this small process takes a tenth of the time that forking pytest takes, with all that it has imported.
    """
    os.fsync = lambda _: None
    for line in sys.stdin:
        order = json.loads(line)

        def work(order=order):
            die_at(order["moment"])
            run(Path(order["destination"]), overwrite=order["overwrite"])

        _, status = os.waitpid(in_child(work), 0)
        print(status, flush=True)


@pytest.fixture(scope="module")
def run_and_die():
    """``run_and_die(moment, destination, overwrite=False) -> status`` of a child that dies at that moment."""
    here = Path(__file__)
    program = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {here.stem}; {here.stem}.serve()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as server:

        def order(moment, destination, overwrite=False):
            order = {"moment": moment, "destination": str(destination), "overwrite": overwrite}
            server.stdin.write(json.dumps(order) + "\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        yield order


def check_nothing_partial_loads(destination, expected, old=None):
    """After a kill: the destination is whole or absent, and nothing in the work folder passes for a model."""
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


def test_killed_at_every_call_and_resumed_the_result_is_bit_identical(tmp_path, expected, run_and_die):
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


def test_killed_twice_and_resumed_the_result_is_bit_identical(tmp_path, expected, run_and_die):
    """The second kill hits the recovery from the first."""
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


def test_killed_while_overwriting_the_old_checkpoint_or_the_new_one_is_there_after_the_next_run(
    tmp_path, expected, run_and_die
):
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
        with pytest.raises(DestinationError):  # puts the old one back where it had been moved aside
            run(destination)
        assert contents(destination) in (expected, old)
        run(destination, overwrite=True)
        assert contents(destination) == expected
        assert names(destination.parent) == ["out"]
        if not killed(status):
            break
    assert absent == 1  # the one instant between the two renames


def test_killed_at_random_moments_and_resumed_the_result_is_bit_identical(tmp_path, expected):
    """Half of the kills hit a writer that waits between two writes of a tensor, half of them one that has gone on."""
    rng = random.Random(2026)
    killed_runs = 0
    for case in range(20):
        destination = tmp_path / str(case) / "out"
        destination.parent.mkdir()
        at_write, write_reached = os.pipe()
        go_on, parent_answer = os.pipe()

        def between_writes(write_reached=write_reached, go_on=go_on):
            os.write(write_reached, b".")
            os.read(go_on, 1)

        child = in_child(lambda destination=destination, wait=between_writes: run(destination, between_writes=wait))
        os.close(write_reached)
        for _ in range(rng.randrange(2 * len(SHARDS))):
            assert os.read(at_write, 1) == b"."
            assert not destination.exists()
            os.write(parent_answer, b".")
        assert os.read(at_write, 1) == b"."
        if case % 2:
            os.write(parent_answer, b"." * 2 * len(SHARDS))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        for descriptor in (at_write, go_on, parent_answer):
            os.close(descriptor)
        killed_runs += killed(status)
        check_nothing_partial_loads(destination, expected)
        if not destination.exists():
            run(destination)
        assert contents(destination) == expected
    assert killed_runs >= 10


def test_a_killed_writer_lets_the_next_one_in(tmp_path):
    def work():
        CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1)
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(in_child(work), 0)
    CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1).close()
    assert names(tmp_path) == []
