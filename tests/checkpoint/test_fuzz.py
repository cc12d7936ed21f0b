"""Tests that a damaged file is either still consistent or refused by a CheckpointError."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from fuzzing.headers import opens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minifloat.checkpoint import Checkpoint
from minifloat.errors import CheckpointError

ARRAYS = {
    "model.a": np.arange(10, dtype=np.uint8),
    "model.b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model.c": np.zeros((0, 4), dtype=np.int64),
}
VALID = safetensors.numpy.save(ARRAYS, {"format": "pt"})
DATA_START = 8 + struct.unpack("<Q", VALID[:8])[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "config.json").write_text("{}")
    return folder


relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(flips=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_file_with_flipped_bytes_is_consistent_or_refused(folder, flips):
    content = bytearray(VALID)
    for position, mask in flips:
        content[position] ^= mask
    opened = opens(folder, bytes(content))
    if all(position >= DATA_START for position, _ in flips):
        assert opened  # the format has no checksum, and the tensors are at the same place


@relaxed
@given(position=st.integers(8, DATA_START - 1), text=st.sampled_from([*'"{}[],:0123456789-.eE', "\\", " ", "\0", "é"]))
def test_a_file_with_a_replaced_header_character_is_consistent_or_refused(folder, position, text):
    content = VALID[:position] + text.encode() + VALID[position + 1 :]
    if len(content) != len(VALID):
        content = struct.pack("<Q", DATA_START - 7) + content[8:]
    opens(folder, content)


def test_every_truncation_is_refused(folder):
    for size in range(len(VALID)):
        assert not opens(folder, VALID[:size])


@relaxed
@given(extra=st.binary(min_size=1, max_size=20))
def test_trailing_bytes_are_refused(folder, extra):
    assert not opens(folder, VALID + extra)


@relaxed
@given(length=st.integers(0, 2**64 - 1))
def test_another_header_length_is_refused(folder, length):
    content = struct.pack("<Q", length) + VALID[8:]
    assert opens(folder, content) == (content == VALID)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("U8"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "F4", "BF16", "X"]) | json_values,
        "shape": st.lists(st.integers(0, 4) | st.sampled_from([2**31, 2**62, 2**64, -1]), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 16) | st.sampled_from([2**63, -1]), min_size=2, max_size=2)
        | json_values,
    },
)


@relaxed
@given(header=st.dictionaries(st.text(max_size=4), fields | json_values, max_size=3), size=st.integers(0, 16))
def test_a_random_header_is_consistent_or_refused(folder, header, size):
    text = json.dumps(header).encode()
    opens(folder, struct.pack("<Q", len(text)) + text + bytes(size))


@relaxed
@given(value=json_values)
def test_a_random_config_or_index_is_consistent_or_refused(folder, value):
    (folder / "model.safetensors").write_bytes(VALID)
    for name in ("config.json", "model.safetensors.index.json"):
        path = folder / name
        path.write_text(json.dumps(value))
        try:
            Checkpoint.open(folder).close()
        except CheckpointError:
            pass
        finally:
            path.unlink()
            (folder / "config.json").write_text("{}")
