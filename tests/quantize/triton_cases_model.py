"""`quantize_checkpoint` with the Triton kernels, interpreted or on a GPU, writes the bytes that the CPU writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from modes import full
from small_llama import llama_tensors
from triton_cases import device

from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize import stream
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

Make = Callable[..., Path]
DEVICE = device()


#: The everyday run casts these in small slabs: scales per block, per tensor and per group.
EVERYDAY = ("fp8-block", "fp8-static", "nvfp4")


@pytest.mark.parametrize(
    ("scheme", "slab_bytes"),
    [("mxfp4", 16 << 20), *((pytest.param if scheme in EVERYDAY else full)(scheme, 4096) for scheme in SCHEMES)],
)
def test_the_files_are_those_of_the_cpu(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, slab_bytes: int
) -> None:
    monkeypatch.setattr(stream, "DEVICE_SLAB_BYTES", slab_bytes)
    source = make_checkpoint(tensors=llama_tensors(layers=1), shards=2)
    for run in "ab":
        (tmp_path / run).mkdir()
    expected = quantize_checkpoint(source, tmp_path / "a" / "model", scheme, QuantizeOptions(impl="reference"))
    actual = quantize_checkpoint(
        source, tmp_path / "b" / "model", scheme, QuantizeOptions(device=DEVICE, impl="triton")
    )
    files = sorted(path.name for path in (tmp_path / "a" / "model").iterdir())
    assert sorted(path.name for path in (tmp_path / "b" / "model").iterdir()) == files
    for name in files:
        if name != "minifloat.json":
            assert (tmp_path / "b" / "model" / name).read_bytes() == (tmp_path / "a" / "model" / name).read_bytes(), (
                name
            )
    reports = [without_sums(json.loads((tmp_path / run / "model" / "minifloat.json").read_text())) for run in "ab"]
    assert reports[0] == reports[1]
    for one, other in zip(actual.quantized, expected.quantized, strict=True):
        assert one.stats is not None
        assert other.stats is not None
        np.testing.assert_allclose(one.stats.signal, other.stats.signal, rtol=1e-12)
        np.testing.assert_allclose(one.stats.noise, other.stats.noise, rtol=1e-12)


def without_sums(report: dict[str, object]) -> dict[str, object]:
    """Return the report without sums of squares, whose last bits depend on the order of summation."""
    text = json.dumps(report)
    parsed: dict[str, object] = json.loads(text, object_hook=lambda entry: entry | dict.fromkeys(entry.keys() & SUMS))
    return parsed


SUMS = {"signal", "noise", "sqnr_db"}
