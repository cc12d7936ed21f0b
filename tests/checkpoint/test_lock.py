from __future__ import annotations

import fcntl
import os

import pytest

from minifloat.checkpoint.own_folder import FolderLock
from minifloat.errors import DestinationError, StorageError


def test_a_lock_creates_its_folder_and_removes_it_when_it_is_empty(tmp_path):
    lock = FolderLock(tmp_path / "work", "lock")
    assert (tmp_path / "work" / "lock").read_text() == f"{os.getpid()}\n"
    lock.release(remove=True)
    assert not (tmp_path / "work").exists()


def test_a_folder_that_is_not_empty_is_kept(tmp_path):
    lock = FolderLock(tmp_path / "work", "lock")
    (tmp_path / "work" / "file").touch()
    lock.release(remove=True)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["file"]


@pytest.mark.parametrize("remove_folder", [False, True])
def test_a_lock_file_that_its_owner_has_just_removed_is_locked_anew(tmp_path, monkeypatch, remove_folder):
    """Otherwise two writers would hold locks on two files of the same name."""
    folder = tmp_path / "work"
    flock = fcntl.flock
    calls = []

    def flock_too_late(descriptor, operation):
        if not calls:
            (folder / "lock").unlink()
            if remove_folder:
                folder.rmdir()
        calls.append(operation)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_too_late)
    lock = FolderLock(folder, "lock")
    assert len(calls) == 2
    with pytest.raises(DestinationError):
        FolderLock(folder, "lock")
    lock.release()


def test_a_file_system_without_locks_is_an_error_with_the_cure(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="choose a destination on a local disk"):
        FolderLock(tmp_path, "lock")
