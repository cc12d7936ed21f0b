"""The folder of packed caches, which only its owner may write to, and the files in it.

A server multiplies with whatever a cache holds, so who can write to it decides what the model answers. The owner of the
process and root can do that anyway: they can change the checkpoint, or minifloat. Nobody else may.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from minifloat.checkpoint.files import storage_errors
from minifloat.errors import UsageError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_folder(folder: Path) -> int:
    """Return a descriptor of the folder of packed caches, which is created, for its owner only, if it is missing."""
    if not hasattr(os, "geteuid"):
        raise UsageError("packed_cache: needs a system with owners and modes of files, as Linux and macOS have")
    with storage_errors(folder, "create the folder of packed caches"):
        folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        root = folder.resolve()
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        reason = why_unsafe(os.fstat(descriptor))
        if reason:
            raise UsageError(f"packed_cache: {root} {reason}; chmod go-w, chown it, or give another folder")
        for parent in root.parents:
            status = parent.stat()
            # in a sticky folder, such as /tmp, nobody can replace the folders of others
            reason = why_unsafe(status, sticky=bool(status.st_mode & stat.S_ISVTX))
            if reason:
                raise UsageError(f"packed_cache: {parent}, which is above {root}, {reason}; give another folder")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(folder: int, name: str) -> tuple[int, os.stat_result] | str:
    """Return a descriptor of a file in the folder, which is no link, and its status; or why the file is not used."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    status = os.fstat(descriptor)
    reason = why_unsafe(status) if stat.S_ISREG(status.st_mode) else "is no regular file"
    if reason:
        os.close(descriptor)
        return f"it {reason}"
    return descriptor, status


def why_unsafe(status: os.stat_result, *, sticky: bool = False) -> str:
    """Return why somebody other than the user and root can change a file or folder; empty if nobody can."""
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}, neither to user {os.geteuid()} nor to root"
    if status.st_mode & _OTHERS_WRITE and not sticky:
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""
