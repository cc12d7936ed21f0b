from __future__ import annotations

import json
import struct
import sys

import numpy as np
import pytest
import safetensors.numpy

from minifloat.checkpoint import Checkpoint, OutputTensor
from minifloat.checkpoint.header import MAX_HEADER_BYTES, encode_header, read_header
from minifloat.checkpoint.tensors import DTYPES, dtype_nbytes
from minifloat.errors import HeaderError, UnknownNameError


def entry(dtype="U8", shape=(4,), span=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}


FOUR = b"\1\2\3\4"
#: (name, header or raw JSON, data, wrong length field or None, part of the message)
LIES = [
    ("length of zero", b"", FOUR, None, "header length is 0 bytes"),
    ("length of one", b"{", FOUR, None, "header length is 1 bytes"),
    ("length beyond the file", {"a": entry()}, FOUR, 1000, "but the file has only"),
    ("length of exactly the file", {"a": entry()}, b"", 60, "but the file has only"),
    ("length above the limit", {}, b"", MAX_HEADER_BYTES + 1, "the format allows"),
    ("length of 2**64 - 1", {}, b"", 2**64 - 1, "the format allows"),
    ("length that cuts the JSON", {"a": entry()}, FOUR, 20, "not valid JSON"),
    ("length that swallows data", {"a": entry()}, FOUR, len(json.dumps({"a": entry()})) + 2, "not valid JSON"),
    ("not UTF-8", b'{"\xff":{}}', b"", None, "not UTF-8"),
    ("half a surrogate pair", b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b"", None, "not UTF-8"),
    ("not JSON", b"{dtype: U8}", b"", None, "not valid JSON"),
    ("a list", b'["a"]', b"", None, "must start with '{'"),
    ("leading space", b' {"a":1}', b"", None, "must start with '{'"),
    ("NUL padding", b"{}\0\0\0\0\0\0", b"", None, "not valid JSON"),
    ("nested too deeply", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", None, "nested too deeply"),
    ("an integer of 5000 digits", b'{"a":' + b"9" * 5000 + b"}", b"", None, "not valid JSON"),
    (
        "duplicate tensor",
        b'{"a":%(e)s,"a":%(e)s}' % {b"e": json.dumps(entry()).encode()},
        FOUR,
        None,
        "'a' is declared",
    ),
    (
        "duplicate field",
        b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}',
        FOUR,
        None,
        "'dtype' is declared twice",
    ),
    ("metadata is a list", {"__metadata__": ["x"], "a": entry()}, FOUR, None, "__metadata__ must map"),
    ("metadata holds a number", {"__metadata__": {"x": 1}, "a": entry()}, FOUR, None, "__metadata__ must map"),
    ("empty name", {"": entry()}, FOUR, None, "empty or holds a NUL"),
    ("NUL in a name", {"a\0b": entry()}, FOUR, None, "empty or holds a NUL"),
    ("entry is a list", {"a": [1]}, FOUR, None, "expected an object"),
    ("no dtype", {"a": {"shape": [4], "data_offsets": [0, 4]}}, FOUR, None, "no dtype"),
    ("no shape", {"a": {"dtype": "U8", "data_offsets": [0, 4]}}, FOUR, None, "no shape"),
    ("no offsets", {"a": {"dtype": "U8", "shape": [4]}}, FOUR, None, "no data_offsets"),
    ("unknown dtype", {"a": entry("F8_E3M4")}, FOUR, None, "unknown dtype 'F8_E3M4'; known: BOOL"),
    ("dtype in lower case", {"a": entry("u8")}, FOUR, None, "unknown dtype"),
    ("dtype is a list", {"a": entry(["U8"])}, FOUR, None, "unknown dtype"),
    ("shape is a number", {"a": {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]}}, FOUR, None, "shape must be"),
    ("negative extents", {"a": entry(shape=(-2, -2))}, FOUR, None, "shape must be"),
    ("float extent", {"a": entry(shape=(4.0,))}, FOUR, None, "shape must be"),
    ("boolean extent", {"a": entry(shape=(True, 4))}, FOUR, None, "shape must be"),
    ("NaN extent", b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', FOUR, None, "NaN is not JSON"),
    ("extent of 2**63", {"a": entry(shape=(2**63,))}, FOUR, None, "shape must be"),
    ("33 dimensions", {"a": entry(shape=[1] * 32 + [4])}, FOUR, None, "at most 32"),
    ("shape that wraps to 4 in 64 bits", {"a": entry(shape=(2**62 + 1, 4))}, FOUR, None, "exceeds 2**63 bits"),
    ("overflow hidden by a zero", {"a": entry(shape=(2**62, 2**62, 0), span=(0, 0))}, b"", None, "exceeds 2**63 bits"),
    ("half a byte", {"a": entry("F4", (3,), (0, 1))}, b"\1", None, "does not fill whole bytes"),
    ("three offsets", {"a": entry(span=(0, 2, 4))}, FOUR, None, "data_offsets must be"),
    ("negative offset", {"a": entry(span=(-4, 0))}, FOUR, None, "data_offsets must be"),
    ("float offset", {"a": entry(span=(0, 4.0))}, FOUR, None, "data_offsets must be"),
    ("reversed offsets", {"a": entry(span=(4, 0))}, FOUR, None, "are reversed"),
    ("fewer bytes than the shape", {"a": entry("F32", (4,))}, FOUR, None, "F32 [4] needs 16 bytes"),
    ("more bytes than the shape", {"a": entry("U8", (2,))}, FOUR, None, "U8 [2] needs 2 bytes"),
    ("scalar of two elements", {"a": entry("U8", ())}, FOUR, None, "needs 1 bytes"),
    ("overlap", {"a": entry(), "b": entry(span=(2, 6))}, FOUR + b"\5\6", None, "'b' overlaps tensor 'a'"),
    ("the same bytes twice", {"a": entry(), "b": entry()}, FOUR, None, "overlaps tensor"),
    ("empty tensor inside another", {"a": entry(), "b": entry(shape=(0,), span=(2, 2))}, FOUR, None, "overlaps"),
    ("hole at the start", {"a": entry(span=(1, 5))}, b"\0" + FOUR, None, "leaves a hole after the header"),
    ("hole in the middle", {"a": entry(), "b": entry(span=(5, 9))}, FOUR * 2 + b"\0", None, "hole after tensor 'a'"),
    ("empty tensor beyond the data", {"a": entry(), "b": entry(shape=(0,), span=(9, 9))}, FOUR, None, "leaves a hole"),
    ("truncated data", {"a": entry()}, FOUR[:3], None, "but the file has only"),
    ("span far beyond the file", {"a": entry("U8", (2**40,), (0, 2**40))}, FOUR, None, "but the file has only"),
    ("trailing bytes", {"a": entry()}, FOUR + b"\0", None, "1 extra"),
    ("data without tensors", {}, FOUR, None, "4 extra"),
]


@pytest.mark.parametrize(
    ("header", "data", "length", "message"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES]
)
def test_an_invalid_header_is_refused_with_the_reason(model, safetensors_bytes, header, data, length, message):
    folder = model({"model.safetensors": safetensors_bytes(header, data, length=length)})
    with pytest.raises(HeaderError) as caught:
        Checkpoint.open(folder)
    assert message in str(caught.value)
    assert str(folder / "model.safetensors") in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("size", range(10))
def test_a_file_too_short_for_a_header_is_refused(model, size):
    with pytest.raises(HeaderError, match="too few"):
        Checkpoint.open(model({"model.safetensors": b"\2\0\0\0\0\0\0\0{"[:size]}))


def test_a_git_lfs_pointer_is_named_as_one(model):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    with pytest.raises(HeaderError, match="git lfs pull"):
        Checkpoint.open(model({"model.safetensors": pointer}))


def test_a_header_without_tensors_is_valid(model, safetensors_bytes):
    with Checkpoint.open(model({"model.safetensors": safetensors_bytes({})})) as checkpoint:
        assert not checkpoint.tensors


def test_unknown_fields_of_an_entry_are_ignored_as_the_reference_reader_does(model, safetensors_bytes):
    content = safetensors_bytes({"a": entry() | {"note": [1]}}, FOUR)
    assert safetensors.numpy.load(content)["a"].tolist() == [1, 2, 3, 4]
    with Checkpoint.open(model({"model.safetensors": content})) as checkpoint:
        assert checkpoint.read("a").tolist() == [1, 2, 3, 4]


def test_tensors_come_in_the_order_of_their_bytes_and_empty_ones_take_none(model, safetensors_bytes):
    header = {"b": entry(span=(4, 8)), "none": entry(shape=(0, 3), span=(4, 4)), "a": entry()}
    folder = model({"model.safetensors": safetensors_bytes(header, FOUR * 2)})
    with Checkpoint.open(folder) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "none", "b"]
        assert checkpoint.read("none").shape == (0,)


def test_reading_a_header_takes_a_few_calls_and_lines_per_tensor(tmp_path):
    """Count executed calls and lines, which do not depend on the speed of the machine."""

    def counts(num_tensors):
        tensors = [OutputTensor(f"model.layers.{i}.mlp.down_proj.weight", "BF16", (4, 8)) for i in range(num_tensors)]
        prefix, spans = encode_header(tensors, {"format": "pt"})
        path = tmp_path / f"{num_tensors}.safetensors"
        path.write_bytes(prefix + bytes(sum(size for _, size in spans.values())))
        calls = lines = 0

        def count_calls(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        def count_lines(frame, event, argument):
            nonlocal lines
            lines += event == "line"
            return count_lines

        profiler, tracer = sys.getprofile(), sys.gettrace()
        try:
            sys.setprofile(count_calls)
            read_header(path)
            sys.setprofile(profiler)
            sys.settrace(count_lines)
            header, _ = read_header(path)
        finally:
            sys.setprofile(profiler)
            sys.settrace(tracer)
        assert len(header.tensors) == num_tensors
        return calls, lines

    calls, lines = counts(1000)
    assert calls < 40 * 1000  # 22 per tensor: a thousand tensors take milliseconds
    assert lines < 12 * counts(100)[1]  # the work grows in proportion to the number of tensors


def test_the_encoded_header_has_the_golden_bytes():
    prefix, spans = encode_header(
        [OutputTensor("w", "F8_E4M3", (2, 3)), OutputTensor("s", "F32", ())], {"format": "pt", "a": "é"}
    )
    text = (
        '{"__metadata__":{"a":"é","format":"pt"},'
        '"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},'
        '"w":{"dtype":"F8_E4M3","shape":[2,3],"data_offsets":[4,10]}}       '
    ).encode()
    assert prefix == struct.pack("<Q", 160) + text
    assert len(text) == 160
    assert spans == {"s": (168, 4), "w": (172, 6)}


def test_a_file_of_one_dtype_has_the_same_bytes_as_the_safetensors_package_writes():
    arrays = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(1, np.float32)}
    metadata = {"format": "pt"}
    prefix, _ = encode_header([OutputTensor(k, "F32", v.shape) for k, v in arrays.items()], metadata)
    ours = prefix + b"".join(array.tobytes() for array in arrays.values())
    assert ours == safetensors.numpy.save(arrays, metadata)


def test_every_tensor_is_aligned_to_its_element_size_in_any_input_order():
    dtypes = ["U8", "F32", "F8_E4M3", "I64", "BF16", "F32", "BOOL", "F64"]
    _, spans = encode_header([OutputTensor(f"t{i}", dtype, (3,)) for i, dtype in enumerate(dtypes)], {})
    for i, dtype in enumerate(dtypes):
        assert spans[f"t{i}"][0] % (DTYPES[dtype] // 8) == 0
    assert spans["t1"] < spans["t5"]  # tensors of equal element size keep the given order


@pytest.mark.parametrize("names", [["a", "a"], [""], ["__metadata__"]])
def test_invalid_tensor_names_raise_an_assertion_error(names):
    with pytest.raises(AssertionError):
        encode_header([OutputTensor(name, "U8", (1,)) for name in names], {})


def test_the_bytes_of_a_shape_are_those_of_its_dtype():
    assert dtype_nbytes("BF16", (3, 5)) == 30
    assert dtype_nbytes("F4", (3, 6)) == 9
    assert dtype_nbytes("F6_E2M3", (4,)) == 3
    assert dtype_nbytes("F32", ()) == 4
    assert dtype_nbytes("F32", (0, 7)) == 0
    with pytest.raises(UnknownNameError, match="valid: BOOL, F4"):
        dtype_nbytes("F5", (1,))
