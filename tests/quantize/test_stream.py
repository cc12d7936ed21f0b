"""Casting from file to file writes what casting slab by slab writes, and stops with the same errors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minifloat.errors import NonFiniteError, StorageError
from minifloat.kernels import native
from minifloat.kernels.quantize.stream import quantize_file
from minifloat.quantize import stream
from minifloat.quantize.job import quantize_checkpoint

Make = Callable[..., Path]
pytestmark = pytest.mark.skipif(native.load() is None, reason="no native library")


def shards(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4"])
def test_shards_and_digests_are_those_of_the_slabs(
    make_checkpoint: Make, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(shards=2)
    streamed = quantize_checkpoint(source, tmp_path / "streamed", scheme)
    monkeypatch.setattr(stream, "_streams", lambda *_: False)
    monkeypatch.setattr(stream, "SLAB_BYTES", 4096)
    in_slabs = quantize_checkpoint(source, tmp_path / "slabs", scheme)
    assert shards(tmp_path / "streamed") == shards(tmp_path / "slabs")
    for one, other in zip(streamed.tensors, in_slabs.tensors, strict=True):
        assert one.source_digest == other.source_digest
        if one.stats is not None and other.stats is not None:
            assert one.stats.noise == pytest.approx(other.stats.noise, rel=1e-6)
            assert one.stats.flushed == other.stats.flushed


def test_a_write_that_fails_names_the_file_and_the_cure(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint()
    read_only = os.open(next(source.glob("*.safetensors")), os.O_RDONLY)
    monkeypatch.setattr(stream, "quantize_file", quantize_to(read_only))
    with pytest.raises(StorageError, match="cannot write"):
        quantize_checkpoint(source, tmp_path / "out", "fp8")
    os.close(read_only)


def quantize_to(descriptor: int) -> Callable[..., object]:
    return lambda weight, place, target: quantize_file(weight, place, replace(target, descriptor=descriptor))


def test_nan_names_the_weight(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    path = next(source.glob("*.safetensors"))
    data = np.fromfile(path, np.uint8)
    data[-512:] = 0xFF  # NaN in BF16
    data.tofile(path)
    with pytest.raises(NonFiniteError, match="are NaN or Inf"):
        quantize_checkpoint(source, tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()
