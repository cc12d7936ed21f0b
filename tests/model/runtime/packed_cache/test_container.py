"""The file of a packed cache and its folder: what is written comes back, and nothing else is believed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minifloat.errors import UsageError
from minifloat.model.runtime.packed_cache import container
from minifloat.model.runtime.packed_cache.container import Contents, UnusableCache, read, write
from minifloat.model.runtime.packed_cache.folder import open_folder

STATED = {"options": {"dtype": None}, "source": {"shards": {"a": [1, 2, 3]}}}
DATA = {"first": np.arange(10_000, dtype=np.uint8), "second": np.arange(7, dtype=np.uint8)}


@pytest.fixture
def folder(tmp_path: Path) -> int:
    return open_folder(tmp_path / "cache")


def written(folder: int) -> int:
    return write(folder, "x", STATED, {name: Contents("packed", (len(data), 1), data) for name, data in DATA.items()})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def changed(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_file_gives_back_what_was_written_page_by_page(folder: int, tmp_path: Path) -> None:
    nbytes = written(folder)
    assert nbytes == (tmp_path / "cache/x").stat().st_size
    mapped = read(folder, "x", STATED)
    mapped.verify()
    for name, data in DATA.items():
        entry = mapped.entries[name]
        assert entry.offset % 4096 == 0
        assert (entry.kind, entry.shape) == ("packed", (len(data), 1))
        assert mapped.map[entry.offset : entry.offset + entry.nbytes] == data.tobytes()
    with pytest.raises(TypeError, match="readonly"):
        mapped.map[0] = 1
    assert oct((tmp_path / "cache/x").stat().st_mode & 0o777) == "0o600"
    assert names(tmp_path / "cache") == ["x"]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("options", {"dtype": "float32"}, r"made with other options: \{'dtype': None\}"),
        ("source", {"shards": {"a": [1, 2, 4]}}, "the checkpoint has changed since it was made"),
    ],
)
def test_a_file_of_something_else_is_refused(folder: int, key: str, value: object, reason: str) -> None:
    written(folder)
    with pytest.raises(UnusableCache, match=reason):
        read(folder, "x", STATED | {key: value})


def test_a_file_of_another_version_is_refused(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    written(folder)
    monkeypatch.setattr(container, "__version__", "0.0.0")
    with pytest.raises(UnusableCache, match=r"minifloat \S+ made it"):
        read(folder, "x", STATED)


def test_one_changed_byte_of_the_weights_is_noticed(folder: int, tmp_path: Path) -> None:
    nbytes = written(folder)
    start = read(folder, "x", STATED).start
    for offset in (start, start + 9999, nbytes - 1):  # the first, one of a weight, one of the padding
        before = (tmp_path / "cache/x").read_bytes()[offset]
        changed(tmp_path / "cache/x", offset, bytes([before ^ 1]))
        with pytest.raises(UnusableCache, match="damaged: their digest differs"):
            read(folder, "x", STATED).verify()
        changed(tmp_path / "cache/x", offset, bytes([before]))
    read(folder, "x", STATED).verify()


@pytest.mark.parametrize(
    ("offset", "reason"), [(0, "no packed cache"), (8, "header is damaged"), (20, "header"), (60, "header is damaged")]
)
def test_a_damaged_header_is_noticed(folder: int, tmp_path: Path, offset: int, reason: str) -> None:
    written(folder)
    changed(tmp_path / "cache/x", offset, b"\xff\xff\xff\x7f")
    with pytest.raises(UnusableCache, match=reason):
        read(folder, "x", STATED)


@pytest.mark.parametrize("left", [0, 10, 3000, 4096, 8192])
def test_a_truncated_file_is_noticed(folder: int, tmp_path: Path, left: int) -> None:
    written(folder)
    os.truncate(tmp_path / "cache/x", left)
    with pytest.raises(UnusableCache, match=r"no packed cache|header is damaged|bytes instead of"):
        read(folder, "x", STATED)


def test_links_devices_and_files_that_others_can_write_are_refused(folder: int, tmp_path: Path) -> None:
    written(folder)
    path = tmp_path / "cache/x"
    path.chmod(0o620)
    with pytest.raises(UnusableCache, match=r"can be written by others \(mode 0620\)"):
        read(folder, "x", STATED)
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnusableCache, match="it is a link"):
        read(folder, "x", STATED)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnusableCache, match="no regular file"):
        read(folder, "x", STATED)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read(folder, "x", STATED)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_and_folders_of_other_users_are_refused(folder: int, tmp_path: Path) -> None:
    written(folder)
    os.chown(tmp_path / "cache/x", 12345, 12345)
    with pytest.raises(UnusableCache, match="belongs to user 12345"):
        read(folder, "x", STATED)
    os.chown(tmp_path / "cache", 12345, 12345)
    with pytest.raises(UsageError, match="belongs to user 12345"):
        open_folder(tmp_path / "cache")


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    os.close(open_folder(tmp_path / "new/cache"))
    assert oct((tmp_path / "new/cache").stat().st_mode & 0o777) == "0o700"
    (tmp_path / "new/cache").chmod(0o1777)  # sticky: nobody can replace files, but everybody can create them
    with pytest.raises(UsageError, match=r"can be written by others \(mode 1777\); chmod go-w"):
        open_folder(tmp_path / "new/cache")
    (tmp_path / "new/cache").chmod(0o700)
    (tmp_path / "new").chmod(0o770)
    with pytest.raises(UsageError, match=r"which is above .*can be written by others \(mode 0770\)"):
        open_folder(tmp_path / "new/cache")
    (tmp_path / "new").chmod(0o1777)  # as /tmp
    os.close(open_folder(tmp_path / "new/cache"))


def test_a_failed_write_leaves_the_file_of_before(folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(folder)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="No space"):
        written(folder)
    assert names(tmp_path / "cache") == ["x"]
    read(folder, "x", STATED).verify()


def test_drafts_of_killed_processes_are_removed_later(folder: int, tmp_path: Path) -> None:
    old, new = tmp_path / "cache/.x.1.draft", tmp_path / "cache/.x.2.draft"
    old.write_bytes(b"")
    new.write_bytes(b"")
    os.utime(old, (0, 0))
    written(folder)
    assert names(tmp_path / "cache") == [".x.2.draft", "x"]


def test_a_file_that_is_replaced_stays_mapped(folder: int) -> None:
    written(folder)
    before = read(folder, "x", STATED)
    write(folder, "x", STATED, {"first": Contents("packed", (1, 1), np.full(5, 9, np.uint8))})
    before.verify()
    assert read(folder, "x", STATED).nbytes < before.nbytes


def test_processes_that_write_at_the_same_time_do_not_disturb_those_that_read(folder: int, tmp_path: Path) -> None:
    written(folder)
    code = "import json, os, sys, numpy; from minifloat.model.runtime.packed_cache.container import Contents, write\n"
    code += "contents = {'first': Contents('packed', (1, 1), numpy.full(100_000, int(sys.argv[3]), numpy.uint8))}\n"
    code += "folder = os.open(sys.argv[1], os.O_RDONLY)\n"
    code += "for _ in range(20): write(folder, 'x', json.loads(sys.argv[2]), contents)"
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), json.dumps(STATED)]
    writers = [subprocess.Popen([*command, str(value)]) for value in (1, 2)]
    while any(process.poll() is None for process in writers):
        read(folder, "x", STATED).verify()
    assert [process.returncode for process in writers] == [0, 0]
    assert read(folder, "x", STATED).nbytes > 100_000
    assert names(tmp_path / "cache") == ["x"]
