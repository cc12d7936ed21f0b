"""The bytes that `quantize` writes of the example model, as they were on 2026-11-22; those of fp8-block on 2026-11-28.

Every implementation gives the same bits on every processor, so these digests hold everywhere. A change that is meant to
keep the bytes keeps the digests; a change that alters them on purpose says so and writes the new digests here.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from minifloat import QuantizeOptions, quantize_checkpoint
from minifloat.checkpoint import Checkpoint

STORYBOOK = Path(__file__).parents[2] / "examples" / "storybook-4m"

#: Scheme and layout -> SHA-256 over name, dtype, shape and data of every tensor, in the order of their names.
DIGESTS = {
    ("fp8-block", "compressed-tensors"): "f9ebbab7d2e5b834abb9fef47e218882b2cad35887a3419a750d1a5a3df1aae4",
    ("fp8", "compressed-tensors"): "ec57949ea540bfc27c14e46d46e502e2e3078d335132f11046107286a794b81f",
    ("fp8-static", "compressed-tensors"): "d774ec1c2461d7140c48eaf1040c92adabef8a482eaf389520f76913ada18500",
    ("fp8-dynamic", "compressed-tensors"): "ec57949ea540bfc27c14e46d46e502e2e3078d335132f11046107286a794b81f",
    ("mxfp8", "compressed-tensors"): "583f6c15398f3bec5516428c95a929149b18c793ad924f0ae1e8fb7871d1a5fa",
    ("mxfp4", "compressed-tensors"): "29d57b2baa8de9cbb87051963a52468598eb3be8f4f3d0d33f2ee4206a976f3b",
    ("nvfp4", "compressed-tensors"): "fceedd04c72dca2fe805325fbd5a6f8211533ad249962cd5b0eef9d239e4fc8b",
    ("fp8-block", "fp8"): "e6e1ef29ae33640d25beb05c63e5d70084f75934a60e3b2a958fda7f1505b04f",
}


def digest(folder: Path) -> str:
    """SHA-256 over the tensors of a checkpoint; headers, config and card do not count."""
    hasher = hashlib.sha256()
    with Checkpoint.open(folder) as checkpoint:
        for name, info in sorted(checkpoint.tensors.items()):
            hasher.update(f"{name} {info.dtype} {info.shape} ".encode())
            hasher.update(checkpoint.read(name).tobytes())
    return hasher.hexdigest()


@pytest.mark.parametrize(("scheme", "layout"), DIGESTS)
def test_the_example_model_is_quantized_to_the_same_bytes(scheme: str, layout: str, tmp_path: Path) -> None:
    quantize_checkpoint(STORYBOOK, tmp_path / "out", scheme, QuantizeOptions(layout=layout))
    assert digest(tmp_path / "out") == DIGESTS[scheme, layout]
