"""Safetensors files: a file is refused, or consistent with itself and with the safetensors library."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random

import numpy as np
import safetensors
import safetensors.numpy

from fuzzing import small
from fuzzing.mutation import change, change_bytes, join_safetensors, split_safetensors
from fuzzing.target import Target
from minifloat.checkpoint import Checkpoint
from minifloat.errors import CheckpointError

_ARRAYS = {
    "model.a": np.arange(10, dtype=np.uint8),
    "model.b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model.c": np.zeros((0, 4), dtype=np.int64),
}
VALID = safetensors.numpy.save(_ARRAYS, {"format": "pt"})
_WORDS = ("__metadata__", "dtype", "shape", "data_offsets", "format", "pt", *_ARRAYS)
_WORDS += ("U8", "I8", "F32", "BF16", "F16", "F64", "I64", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "C64")


def opens(folder: Path, content: bytes) -> bool:
    """Return whether the folder opens with this file; if it does, it is consistent and safetensors opens it too."""
    path = folder / "model.safetensors"
    path.write_bytes(content)
    try:
        checkpoint = Checkpoint.open(folder)
    except CheckpointError:
        return False
    with checkpoint:
        infos = list(checkpoint.tensors.values())
        end = 8 + struct.unpack("<Q", content[:8])[0]
        for info in infos:
            assert info.offset == end
            end += info.nbytes
            assert checkpoint.read(info.name).tobytes() == content[info.offset : end]
        assert end == len(content)
        with safetensors.safe_open(path, "np") as reference:
            assert set(reference.keys()) == set(checkpoint.tensors)
            for info in infos:
                assert tuple(reference.get_slice(info.name).get_shape()) == info.shape
                assert reference.get_slice(info.name).get_dtype() == info.dtype
    return True


def _run(data: bytes) -> None:
    folder = small.scratch() / "headers"
    if not folder.is_dir():
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    opens(folder, data)


def _mutate(data: bytes, largest: int, random: Random) -> bytes:
    parts = split_safetensors(data)
    if parts is None or random.random() < 0.2:
        return change_bytes(data, random)[:largest]
    header, tail = parts
    return join_safetensors(change(header, random, _WORDS), tail)[:largest]


TARGET = Target(_run, lambda: {"valid": VALID}, seconds=1, mutate=_mutate)
