"""Memory that a model was read into goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")

#: Frees one piece, which teaches glibc to keep such pieces; then many, with something small above each.
PROGRAM = """
import contextlib, psutil, sys, torch
from minifloat.model.runtime.tensors import returned_when_freed
def rss():
    return psutil.Process().memory_info().rss
del_me = torch.ones(5 << 20); del del_me
with returned_when_freed() if sys.argv[1] == "yes" else contextlib.nullcontext():
    before, kept, pieces = rss(), [], []
    for _ in range(8):
        pieces.append(torch.ones(5 << 20))
        kept.append(torch.ones(1 << 12))
    pieces.clear()
    print((rss() - before) >> 20)
"""


def held(guarded: bool) -> int:
    command = [sys.executable, "-c", PROGRAM, "yes" if guarded else "no"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)})
    return int(done.stdout)


@needs_glibc
def test_pieces_that_are_freed_are_not_kept() -> None:
    assert held(guarded=True) < 16


@needs_glibc
def test_without_the_context_freed_pieces_are_kept() -> None:
    assert held(guarded=False) > 80
