from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch

from minifloat.checkpoint import Checkpoint, CheckpointWriter, OutputTensor, encode_index
from minifloat.checkpoint import shard as shard_module
from minifloat.checkpoint.journal import sealed_line
from minifloat.checkpoint.layout import JOURNAL_FILE as JOURNAL
from minifloat.errors import DestinationError, NotACheckpointError, StorageError

PAIR = [OutputTensor("a", "U8", (4,)), OutputTensor("b", "F32", (2,))]


def write_shard(writer, name, tensors=PAIR, record=None):
    shard = writer.shard(name, tensors, {"format": "pt"})
    for tensor in tensors:
        shard.write(tensor.name, bytes([len(name) + i for i in range(tensor.nbytes)]))
    shard.commit(record or {"sha": name})


def write_model(destination, *, fingerprint="f", overwrite=False, config=b"{}"):
    with CheckpointWriter(destination, fingerprint=fingerprint, total_bytes=12, overwrite=overwrite) as writer:
        if "model.safetensors" not in writer.finished:
            write_shard(writer, "model.safetensors")
        writer.write_file("config.json", config)
        return writer.commit()


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks up a descriptor's file in /proc")

# The output


def test_the_safetensors_package_reads_the_output(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "bytes": rng.integers(0, 256, (3, 5), dtype=np.uint8),
        "floats": rng.standard_normal((2, 7)).astype(np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(3, dtype=np.int64),
    }
    names = {"uint8": "U8", "float32": "F32", "int64": "I64"}
    tensors = [OutputTensor(name, names[array.dtype.name], array.shape) for name, array in arrays.items()]
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=100) as writer:
        shard = writer.shard("model.safetensors", tensors, {"format": "pt"})
        for name, array in arrays.items():
            shard.write(name, array)
        shard.commit({})
        writer.write_file("config.json", b'{"model_type": "llama"}')
        writer.write_file("additional_chat_templates/rag.jinja", b"{{x}}")
        out = writer.commit()
    assert sorted(contents(out)) == ["additional_chat_templates/rag.jinja", "config.json", "model.safetensors"]
    loaded = safetensors.numpy.load_file(out / "model.safetensors")
    assert {name: array.tobytes() for name, array in loaded.items()} == {n: a.tobytes() for n, a in arrays.items()}
    assert loaded["floats"].shape == (2, 7)
    with safetensors.safe_open(out / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    with Checkpoint.open(out) as checkpoint:
        assert checkpoint.read("floats").tobytes() == arrays["floats"].tobytes()
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_torch_reads_every_dtype_that_a_scheme_writes(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=100) as writer:
        write_shard(writer, "model.safetensors", [OutputTensor("odd", "U8", (3,)), OutputTensor("t", dtype, (2, 3))])
        writer.write_file("config.json", b"{}")
        out = writer.commit()
    tensor = safetensors.torch.load_file(out / "model.safetensors")["t"]
    assert tuple(tensor.shape) == (2, 3)
    with Checkpoint.open(out) as checkpoint:
        assert checkpoint.tensors["t"].dtype == dtype
        assert tensor.view(torch.uint8).numpy().tobytes() == checkpoint.read("t").tobytes()


def test_several_shards_and_their_index_open_as_one_model(tmp_path):
    shards = {f"model-{i}.safetensors": [OutputTensor(f"t{i}", "F32", (i, 2))] for i in (1, 2)}
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=24) as writer:
        for name, tensors in shards.items():
            write_shard(writer, name, tensors)
        writer.write_file("model.safetensors.index.json", encode_index(shards))
        writer.write_file("config.json", b"{}")
        out = writer.commit()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 24},
        "weight_map": {"t1": "model-1.safetensors", "t2": "model-2.safetensors"},
    }
    with Checkpoint.open(out) as checkpoint:
        assert list(checkpoint.tensors) == ["t1", "t2"]


def test_slabs_from_many_threads_in_any_order_give_the_same_file(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 64_000, dtype=np.uint8)
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=64_000) as writer:
        shard = writer.shard("model.safetensors", [OutputTensor("t", "U8", (64, 1000))], {})
        slabs = np.random.default_rng(1).permutation(64)

        def work(mine):
            for i in mine:
                shard.write("t", data[i * 1000 : (i + 1) * 1000], start=int(i) * 1000)

        threads = [threading.Thread(target=work, args=(slabs[k::8],)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        shard.commit({})
        writer.write_file("config.json", b"{}")
        with Checkpoint.open(writer.commit()) as checkpoint:
            assert np.array_equal(checkpoint.read("t"), data)


def test_shards_are_committed_from_many_threads(tmp_path):
    names = [f"model-{i}.safetensors" for i in range(12)]
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        threads = [threading.Thread(target=write_shard, args=(writer, name)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        assert writer.finished == {name: {"sha": name} for name in names}


def test_short_writes_of_the_operating_system_are_continued(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data[:3]), at))
    slow = contents(write_model(tmp_path / "slow"))
    monkeypatch.undo()
    assert slow == contents(write_model(tmp_path / "fast"))


def test_short_reads_of_the_operating_system_are_continued(tmp_path, monkeypatch):
    out = write_model(tmp_path / "out")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:3]], at))
    with Checkpoint.open(out) as checkpoint:
        assert checkpoint.read("b").tolist() == [17 + i for i in range(8)]


# Bugs of the caller do not reach the destination


@pytest.mark.parametrize(
    ("writes", "message"),
    [
        ([], "byte 0 was never written"),
        ([(0, 3)], "byte 3 was never written"),
        ([(1, 3)], "byte 0 was written twice or never"),
        ([(0, 2), (1, 3)], "byte 1 was written twice or never"),
        ([(0, 4), (0, 4)], "byte 0 was written twice or never"),
        ([(0, 1), (2, 2), (0, 1)], "written twice or never"),
        ([(2, 3)], "bytes 2 to 5 of a tensor of 4"),
        ([(-1, 2)], "bytes -1 to 1 of a tensor of 4"),
    ],
)
def test_a_tensor_that_is_not_written_exactly_once_is_not_committed(tmp_path, writes, message):
    def attempt():
        with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
            shard = writer.shard("model.safetensors", [OutputTensor("a", "U8", (4,))], {})
            for start, size in writes:
                shard.write("a", bytes(size), start)
            shard.commit({})

    with pytest.raises(AssertionError, match=message):
        attempt()
    assert names_in(tmp_path) == []


def test_an_unfinished_shard_is_not_committed(tmp_path):
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        writer.shard("model.safetensors", PAIR, {})
        writer.write_file("config.json", b"{}")
        with pytest.raises(AssertionError, match=r"unfinished shards: model\.safetensors"):
            writer.commit()
    assert not (tmp_path / "out").exists()


def test_an_output_that_does_not_open_is_not_committed(tmp_path):
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        write_shard(writer, "model.safetensors")
        with pytest.raises(NotACheckpointError, match=r"no config\.json"):
            writer.commit()
    assert not (tmp_path / "out").exists()


def test_an_output_with_a_shard_that_the_index_does_not_name_is_not_committed(tmp_path):
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        write_shard(writer, "m-1.safetensors")
        write_shard(writer, "m-2.safetensors", [OutputTensor("c", "U8", (1,))])
        writer.write_file("model.safetensors.index.json", encode_index({"m-1.safetensors": PAIR}))
        writer.write_file("config.json", b"{}")
        with pytest.raises(AssertionError, match=r"m-2\.safetensors"):
            writer.commit()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../config.json", "/tmp/x", "", "model.safetensors", "a\0b"])
def test_a_small_file_outside_the_folder_raises_an_assertion_error(tmp_path, name):
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer, pytest.raises(AssertionError):
        writer.write_file(name, b"")


@pytest.mark.parametrize("name", ["../m.safetensors", "/tmp/m.safetensors", "m.bin", ""])
def test_a_shard_outside_the_folder_raises_an_assertion_error(tmp_path, name):
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer, pytest.raises(AssertionError):
        writer.shard(name, PAIR, {})


# The destination


def test_an_existing_destination_is_refused_with_the_cure(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(DestinationError, match="exists already; choose another name or use --overwrite"):
        CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1)
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("destination", ["none/out", "file/out", "/", ".."])
def test_a_destination_without_a_parent_is_refused(tmp_path, monkeypatch, destination):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DestinationError, match="does not exist; create"):
        CheckpointWriter(destination, fingerprint="f", total_bytes=1)


def test_overwriting_replaces_the_old_checkpoint_at_the_end(tmp_path):
    old = contents(write_model(tmp_path / "out", config=b'{"old": 1}'))
    with CheckpointWriter(tmp_path / "out", fingerprint="g", total_bytes=1, overwrite=True) as writer:
        write_shard(writer, "new.safetensors")
        writer.write_file("config.json", b"{}")
        assert contents(tmp_path / "out") == old
        writer.commit()
    assert sorted(contents(tmp_path / "out")) == ["config.json", "new.safetensors"]
    assert names_in(tmp_path) == ["out"]


def test_a_folder_that_is_not_a_model_is_not_overwritten(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(DestinationError, match="it is no model and is not overwritten"):
        CheckpointWriter(tmp_path / "home", fingerprint="f", total_bytes=1, overwrite=True)
    assert names_in(tmp_path) == ["home"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_destination_that_is_not_a_folder_is_not_overwritten(tmp_path, kind):
    (tmp_path / "target").mkdir()
    (tmp_path / "out").symlink_to("target") if kind == "link" else (tmp_path / "out").touch()
    with pytest.raises(DestinationError, match="is not a folder and is not overwritten"):
        CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1, overwrite=True)


def test_a_destination_that_appears_during_the_work_is_kept(tmp_path):
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        write_shard(writer, "model.safetensors")
        writer.write_file("config.json", b"{}")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").touch()
        with pytest.raises(DestinationError, match="exists already"):
            writer.commit()
    assert names_in(tmp_path / "out") == ["mine"]
    shutil.rmtree(tmp_path / "out")
    write_model(tmp_path / "out")  # resumes
    assert names_in(tmp_path) == ["out"]


def test_a_second_writer_of_the_same_destination_is_refused(tmp_path):
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        write_shard(writer, "model.safetensors")
        with pytest.raises(DestinationError, match=f"process {os.getpid()} is writing here"):
            CheckpointWriter(tmp_path / "out", fingerprint="g", total_bytes=1)
        writer.write_file("config.json", b"{}")
        writer.commit()
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_foreign_file_or_folder_with_the_name_of_the_work_folder_is_kept(tmp_path, kind):
    work = tmp_path / "out.minifloat-work"
    if kind == "folder":
        work.mkdir()
        (work / "thesis.tex").touch()
    elif kind == "file":
        work.touch()
    else:
        (tmp_path / "elsewhere").mkdir()
        work.symlink_to("elsewhere")
    with pytest.raises(DestinationError, match="move"):
        CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1)
    assert os.path.lexists(work)
    if kind == "folder":
        assert names_in(work) == ["thesis.tex"]


# Resuming


def interrupted(destination, names=("m-1.safetensors", "m-2.safetensors"), fingerprint="f"):
    """Leave the work folder of a run that finished these shards."""
    with CheckpointWriter(destination, fingerprint=fingerprint, total_bytes=1) as writer:
        for name in names:
            write_shard(writer, name)
        return writer.work


def test_an_interrupted_run_is_resumed(tmp_path):
    work = interrupted(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for folder in (work, work / "output", work / "pending"):
        with pytest.raises(NotACheckpointError):
            Checkpoint.open(folder)
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        assert writer.finished == {name: {"sha": name} for name in ("m-1.safetensors", "m-2.safetensors")}
        assert writer.restarted_because is None


def test_work_of_another_fingerprint_is_discarded_with_the_reason(tmp_path):
    interrupted(tmp_path / "out", fingerprint="other")
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        assert writer.finished == {}
        assert "another source, scheme, option or version" in writer.restarted_because
        assert names_in(writer.work / "output") == []


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b"[" * 60_000, b'{"run":"f","version":3}\n', sealed_line(b'{"version":3}'), None]
)
def test_work_whose_first_line_cannot_be_read_is_discarded_with_the_reason(tmp_path, line):
    journal = interrupted(tmp_path / "out") / JOURNAL
    others = journal.read_bytes().splitlines(keepends=True)[1:]
    journal.unlink() if line is None else journal.write_bytes(b"".join([line, *others]))
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        assert writer.finished == {}
        assert "cannot be read" in writer.restarted_because


def test_an_incomplete_line_of_the_journal_is_ignored_and_removed(tmp_path):
    journal = interrupted(tmp_path / "out") / JOURNAL
    whole = journal.read_bytes()
    second = sum(map(len, whole.splitlines(keepends=True)[:2]))
    for cut in range(second, len(whole)):
        journal.write_bytes(whole[:cut])
        with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
            assert list(writer.finished) == ["m-1.safetensors"]
            write_shard(writer, "m-2.safetensors")
        assert journal.read_bytes() == whole


@pytest.mark.parametrize(
    "line", [b"\0\0\0\n", b"[]\n", b'{"file": 3}\n', b'{"file": "../x", "size": 1, "record": {}}\n']
)
def test_a_damaged_line_of_the_journal_marks_no_shard_as_finished(tmp_path, line):
    journal = interrupted(tmp_path / "out", ["m-1.safetensors"]) / JOURNAL
    journal.write_bytes(journal.read_bytes() + line)
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        assert list(writer.finished) == ["m-1.safetensors"]


@pytest.mark.parametrize("damage", ["missing", "shorter", "longer", "header", "another file", "fifo", "link", "a bit"])
def test_a_journaled_shard_with_a_damaged_file_is_written_again(tmp_path, damage):
    path = interrupted(tmp_path / "out") / "output" / "m-2.safetensors"
    data = path.read_bytes()
    path.unlink()
    if damage == "fifo":
        os.mkfifo(path)
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage != "missing":
        another = safetensors.numpy.save({"c": np.zeros(3)})
        flipped = data[:-1] + bytes([data[-1] ^ 1])
        damaged = {
            "a bit": flipped,
            "shorter": data[:-1],
            "longer": data + b"\0",
            "header": bytes(8) + data[8:],
            "another file": another,
        }
        path.write_bytes(damaged[damage])
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        assert list(writer.finished) == ["m-1.safetensors"]
        assert list(writer.damaged) == ["m-2.safetensors"]
        write_shard(writer, "m-2.safetensors")
    assert path.read_bytes() == data
    assert not path.is_symlink()


@pytest.mark.parametrize("changed", ["size", "digest", "pieces", "record"])
def test_a_line_of_the_journal_with_a_changed_value_marks_no_shard_as_finished(tmp_path, changed):
    journal = interrupted(tmp_path / "out", ["m-1.safetensors"]) / JOURNAL
    entry = json.loads(journal.read_text().splitlines()[1])
    digit = next(digit for digit in str(entry[changed]) if digit.isdigit() or digit.islower())
    at = journal.read_text().index(f'"{changed}"') + len(changed) + 2
    text = journal.read_text()
    journal.write_text(text[:at] + text[at:].replace(digit, "7" if digit != "7" else "8", 1))
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        assert writer.finished == {}


# What lies in the work folder under our names and is not ours


OURS = ["lock", JOURNAL, "output", "pending"]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("kind", ["link to a file", "link to a folder", "hard link", "fifo"])
def test_what_is_planted_in_the_work_folder_changes_nothing_outside_of_it(tmp_path, name, kind):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.tex").write_text("ten years")
    work = interrupted(tmp_path / "out")
    shutil.rmtree(work / name) if (work / name).is_dir() else (work / name).unlink()
    if kind == "fifo":
        os.mkfifo(work / name)
    elif kind == "hard link":
        (work / name).hardlink_to(victim / "thesis.tex")
    else:
        (work / name).symlink_to(victim / "thesis.tex" if kind == "link to a file" else victim)
    refusal = ""
    try:
        with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
            write_shard(writer, "m-3.safetensors")
            writer.write_file("config.json", b"{}")
    except DestinationError as error:
        refusal = str(error)
    if refusal:  # else what was planted was removed, and written anew
        assert f"out.minifloat-work/{name}: " in refusal
        assert "minifloat did not create it; move it away" in refusal
    assert contents(victim) == {"thesis.tex": b"ten years"}


@pytest.mark.parametrize("name", ["lock", "output"])
def test_a_planted_link_is_refused_by_its_name(tmp_path, name):
    work = interrupted(tmp_path / "out")
    shutil.rmtree(work / name) if name == "output" else (work / name).unlink(missing_ok=True)
    (work / name).symlink_to(tmp_path)
    with pytest.raises(
        DestinationError, match=rf"minifloat-work/{name}: .*; minifloat did not create it; move it away"
    ):
        CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1)


def test_the_work_folder_is_readable_by_its_owner_only_and_the_output_is_not_so(tmp_path):
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        assert writer.work.stat().st_mode & 0o777 == 0o700
    (tmp_path / "usual").mkdir()
    assert write_model(tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("of", ["folder", "lock"])
def test_a_work_folder_of_another_user_is_refused(tmp_path, monkeypatch, of):
    work = interrupted(tmp_path / "out")
    if of == "folder":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(DestinationError, match=r"work: belongs to user \d+, not to user 12345"):
            CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1)
        return
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to somebody else")
    os.chown(work / JOURNAL, 12345, 12345)
    with pytest.raises(DestinationError, match=r"journal\.jsonl: belongs to user 12345, the folder to user 0"):
        CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1)


def test_a_discarded_shard_stays_discarded_in_the_next_run(tmp_path):
    interrupted(tmp_path / "out")
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        writer.discard("m-1.safetensors")
        assert list(writer.finished) == ["m-2.safetensors"]
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        assert list(writer.finished) == ["m-2.safetensors"]
        write_shard(writer, "m-1.safetensors", record={"sha": "new"})
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        assert writer.finished["m-1.safetensors"] == {"sha": "new"}


def test_an_exit_with_an_error_keeps_finished_shards_and_deletes_unfinished_ones(tmp_path):
    def fail():
        with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
            write_shard(writer, "m-1.safetensors")
            writer.shard("m-2.safetensors", PAIR, {})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names_in(tmp_path / "out.minifloat-work" / "output") == ["m-1.safetensors"]


def test_an_exit_without_finished_shards_removes_the_work_folder(tmp_path):
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        writer.shard("m-1.safetensors", PAIR, {})
        writer.write_file("config.json", b"{}")
    assert names_in(tmp_path) == []


def test_no_reader_accepts_an_unfinished_shard(tmp_path):
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        shard = writer.shard("model.safetensors", PAIR, {})
        for tensor in PAIR:
            shard.write(tensor.name, bytes(tensor.nbytes))
        with pytest.raises(safetensors.SafetensorError):
            safetensors.numpy.load_file(shard.path)


# Errors of the operating system


def test_too_little_disk_space_is_refused_before_the_work(tmp_path):
    with pytest.raises(StorageError, match=r"needs 1(,000){6} bytes, the disk has [\d,]+ bytes free; free some space"):
        CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=10**18)
    assert names_in(tmp_path) == []


def test_finished_shards_reduce_the_required_disk_space(tmp_path, monkeypatch):
    work = interrupted(tmp_path / "out")
    done = sum(path.stat().st_size for path in (work / "output").iterdir())
    usage = shutil._ntuple_diskusage(1000, 900, 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=done + 100).close()
    with pytest.raises(StorageError, match="free some space"):
        CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=done + 101)
    assert CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=0).finished


REFUSALS = [
    (errno.ENOSPC, "No space left on device; free some space"),
    (errno.EDQUOT, "your disk quota"),
    (errno.EIO, "the disk reports a fault"),
    (errno.EROFS, "this file system is read-only"),
    (errno.EACCES, "check the permissions"),
]


@needs_proc
@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
@pytest.mark.parametrize(("number", "cure"), REFUSALS, ids=[errno.errorcode[number] for number, _ in REFUSALS])
def test_a_refused_write_names_the_file_and_the_cure_and_the_work_is_resumed(tmp_path, monkeypatch, call, number, cure):
    original = getattr(os, call)

    def refuse(descriptor, *rest):
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "m-2.safetensors":
            raise OSError(number, os.strerror(number))
        return original(descriptor, *rest)

    def attempt():
        with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
            write_shard(writer, "m-1.safetensors")
            monkeypatch.setattr(os, call, refuse)
            write_shard(writer, "m-2.safetensors")

    with pytest.raises(StorageError, match=r"m-2\.safetensors: cannot .*" + cure):
        attempt()
    monkeypatch.undo()
    assert names_in(tmp_path / "out.minifloat-work" / "output") == ["m-1.safetensors"]
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        assert list(writer.finished) == ["m-1.safetensors"]


def test_a_file_system_that_cannot_reserve_space_is_used_without_reserving(tmp_path, monkeypatch):
    expected = contents(write_model(tmp_path / "a"))

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    assert contents(write_model(tmp_path / "b")) == expected
    monkeypatch.delattr(os, "posix_fallocate")
    assert contents(write_model(tmp_path / "c")) == expected


def test_a_shard_is_not_finished_if_the_journal_cannot_be_written(tmp_path, monkeypatch):
    pwrite = os.pwrite

    def torn(descriptor, data, at):
        if bytes(data).startswith(b'{"file"'):
            return pwrite(descriptor, data[:5], at)
        if bytes(data).startswith(b'e"'):
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, at)

    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        write_shard(writer, "m-1.safetensors")
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", torn)
            with pytest.raises(StorageError, match=r"journal\.jsonl: cannot write the journal: No space"):
                write_shard(writer, "m-2.safetensors")
        assert list(writer.finished) == ["m-1.safetensors"]
        write_shard(writer, "m-3.safetensors")
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        assert list(writer.finished) == ["m-1.safetensors", "m-3.safetensors"]


def test_a_file_size_limit_of_the_system_is_an_error_with_the_cure(tmp_path):
    """Set a real limit in a child process, because a process cannot raise its limit again."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        message = "no error"
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
                write_shard(writer, "m-1.safetensors")
                write_shard(writer, "m-2.safetensors", [OutputTensor("big", "U8", (10_000,))])
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, message.encode())
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    message = os.read(read, 10_000).decode()
    os.close(read)
    os.close(write)
    assert message.startswith("StorageError: ")
    assert "m-2.safetensors: cannot create a file of" in message
    assert "ulimit -f" in message
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1) as writer:
        assert list(writer.finished) == ["m-1.safetensors"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_parent_without_permission_is_an_error_with_the_cure(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StorageError, match="check the permissions"):
            CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1)
    finally:
        tmp_path.chmod(0o700)


def test_a_refused_creation_of_the_folder_is_an_error_with_the_cure(tmp_path, monkeypatch):
    def refuse(self, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"out\.minifloat-work.*Permission denied; check the permissions"):
        CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=1)


def test_an_interrupt_between_the_two_renames_puts_the_old_checkpoint_back(tmp_path, monkeypatch):
    old = contents(write_model(tmp_path / "out"))
    rename = os.rename

    def interrupt(source, target, **folders):
        rename(source, target, **folders)
        if Path(source).name == "out":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_model(tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == old


def test_a_destination_that_cannot_be_renamed_keeps_the_old_one_and_the_work(tmp_path, monkeypatch):
    old = contents(write_model(tmp_path / "out"))
    rename = os.rename

    def refuse(source, target, **folders):
        if source == "output":
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(source, target, **folders)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(StorageError, match="cannot put the finished output in place: Device or resource busy"):
            write_model(tmp_path / "out", overwrite=True, config=b'{"new": 1}')
    assert contents(tmp_path / "out") == old
    write_model(tmp_path / "out", overwrite=True, config=b'{"new": 1}')
    assert contents(tmp_path / "out") == old | {"config.json": b'{"new": 1}'}


@pytest.mark.parametrize("call", ["fsync", "unlink"])
def test_a_cleanup_that_fails_after_the_rename_is_a_warning_and_the_output_is_complete(
    tmp_path, monkeypatch, caplog, call
):
    expected = contents(write_model(tmp_path / "expected"))
    rename = os.rename

    def refuse(*arguments, **folders):
        raise OSError(errno.EIO, "Input/output error")

    def rename_and_break(source, target, **folders):
        rename(source, target, **folders)
        if source == "output":
            monkeypatch.setattr(os, call, refuse)

    monkeypatch.setattr(os, "rename", rename_and_break)
    out = write_model(tmp_path / "out")
    monkeypatch.undo()
    assert contents(out) == expected
    assert "out is complete, but not all of" in caplog.text
    assert "Input/output error" in caplog.text
    write_model(tmp_path / "out", overwrite=True)
    assert names_in(tmp_path) == ["expected", "out"]


@needs_proc
@pytest.mark.parametrize("name", ["model.safetensors", JOURNAL, "lock", "out.minifloat-work", "out"])
def test_a_file_that_cannot_be_closed_is_no_traceback(tmp_path, monkeypatch, name):
    close, refused = os.close, []

    def refuse(descriptor):
        named = Path(f"/proc/self/fd/{descriptor}").readlink().name.removesuffix(" (deleted)")
        close(descriptor)
        if named == name:
            refused.append(named)
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", refuse)
        if name == "model.safetensors":
            with pytest.raises(StorageError, match=r"model\.safetensors: cannot close it: Input/output error"):
                write_model(tmp_path / "out")
        else:
            write_model(tmp_path / "out")
    assert refused
    assert (tmp_path / "out").exists() == (name != "model.safetensors")


def test_written_bytes_go_to_the_disk_before_the_shard_is_complete(tmp_path, monkeypatch):
    files, real = [], shard_module._start_write_back
    monkeypatch.setattr(shard_module, "_WRITE_BACK_BYTES", 100)
    monkeypatch.setattr(
        shard_module, "_start_write_back", lambda file: (files.append(os.fstat(file).st_size), real(file))
    )
    with CheckpointWriter(tmp_path / "out", fingerprint="f", total_bytes=250) as writer:
        shard = writer.shard("model.safetensors", [OutputTensor("a", "U8", (250,))], {})
        for start in range(0, 250, 50):
            shard.write("a", bytes(range(start, start + 50)), start)
        shard.commit({})
        written = shard.path.read_bytes()
        assert len(files) == 2  # after 100 and after 200 bytes
        assert set(files) == {len(written)}
        assert written[-250:] == bytes(range(250))


@pytest.mark.parametrize("found", [lambda *_: -1, None], ids=["it fails", "it does not exist"])
def test_starting_to_write_back_is_only_a_hint(tmp_path, monkeypatch, found):
    monkeypatch.setattr(shard_module, "_WRITE_BACK_BYTES", 1)
    monkeypatch.setattr(shard_module, "_sync_file_range", lambda: found)
    assert "model.safetensors" in contents(write_model(tmp_path / "out"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a call of Linux")
def test_linux_has_the_call_that_starts_to_write_back(tmp_path):
    call = shard_module._sync_file_range()
    assert call is not None
    with open(tmp_path / "file", "wb") as file:
        file.write(bytes(10))
        file.flush()
        assert call(file.fileno(), 0, 0, 2) == 0
    assert call(-1, 0, 0, 2) == -1
