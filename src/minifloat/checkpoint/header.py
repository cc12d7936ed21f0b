"""The safetensors header and the shard index: parsers for untrusted files and deterministic encoders.

Everything in a header is checked against the file's size before a number in it is used. The index repeats what the
headers say, so both are compared: some tools would drop a tensor that only one names. Values have no checksum.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minifloat.checkpoint.files import is_safe_name, open_regular, parse_object, read_exactly, read_small
from minifloat.checkpoint.layout import GGUF_HINT, INDEX_FILE, SHARD_SUFFIX, SINGLE_FILE, is_gguf, is_pickle
from minifloat.checkpoint.tensors import DTYPES, MAX_SIZE, OutputTensor, TensorInfo, dtype_nbytes
from minifloat.errors import HeaderError, NotACheckpointError, ShardIndexError, UnsafeFileError

LENGTH_BYTES = 8  #: size of the file's first field, the header's length as a little-endian unsigned integer
MAX_HEADER_BYTES = 100_000_000  #: the limit of the safetensors package
MAX_RANK = 32  #: the limit of numpy
_MIN_HEADER_BYTES = len(b"{}")
_ALIGNMENT = 8
_METADATA = "__metadata__"
_LFS_MAGIC = b"version "
_TORN = "the file is incomplete or corrupt: download or copy it again"


@dataclass(frozen=True)
class ShardHeader:
    """A checked header."""

    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]


def read_header(path: Path) -> tuple[ShardHeader, os.stat_result]:
    descriptor, status = open_regular(path)
    try:
        return header_of(descriptor, status.st_size, path), status
    finally:
        os.close(descriptor)


def header_of(descriptor: int, file_bytes: int, path: Path) -> ShardHeader:
    def read(start: int, count: int) -> bytes:
        data = bytearray(count)
        read_exactly(descriptor, memoryview(data), start, path)
        return bytes(data)

    return check_header(read, path=path, file_bytes=file_bytes)


def check_header(read: Callable[[int, int], bytes], *, path: Path, file_bytes: int) -> ShardHeader:
    length = _header_length(read(0, min(LENGTH_BYTES, file_bytes)), path, file_bytes)
    return parse_header(read(LENGTH_BYTES, length), path=path, file_bytes=file_bytes)


def _header_length(prefix: bytes, path: Path, file_bytes: int) -> int:
    if len(prefix) < LENGTH_BYTES or file_bytes < LENGTH_BYTES + _MIN_HEADER_BYTES:
        raise HeaderError(path, f"{file_bytes} bytes are too few for a safetensors file; {_TORN}")
    if prefix == _LFS_MAGIC:
        raise HeaderError(path, "this is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
    (length,) = struct.unpack("<Q", prefix)
    if length < _MIN_HEADER_BYTES:
        raise HeaderError(path, f"header length is {length} bytes, at least {_MIN_HEADER_BYTES} are needed; {_TORN}")
    if length > MAX_HEADER_BYTES:
        raise HeaderError(
            path, f"header length is {length} bytes, the format allows {MAX_HEADER_BYTES}: not a safetensors file?"
        )
    if length > file_bytes - LENGTH_BYTES:
        raise HeaderError(path, f"header length is {length} bytes, but the file has only {file_bytes}; {_TORN}")
    return int(length)


def parse_header(text: bytes, *, path: Path, file_bytes: int) -> ShardHeader:
    """Parse a header and check its tensors against each other and against the file's size."""
    declared = _load(text, path)
    metadata = declared.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError(path, f"{_METADATA} must map strings to strings")
    data_start = LENGTH_BYTES + len(text)
    infos = [_parse_tensor(name, entry, path, data_start) for name, entry in declared.items()]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    _check_tiling(infos, path, data_start, file_bytes)
    return ShardHeader(tuple(infos), metadata)


def encode_header(
    tensors: Iterable[OutputTensor], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Encode the header of a file, and assign a byte range to each tensor, the widest elements first for alignment."""
    entries: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype]):
        if not tensor.name or tensor.name == _METADATA or tensor.name in spans:
            raise AssertionError(f"tensor name {tensor.name!r} is empty, reserved or given twice")
        spans[tensor.name] = (end, tensor.nbytes)
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    data_start = LENGTH_BYTES + len(text)
    return struct.pack("<Q", len(text)) + text, {name: (data_start + at, size) for name, (at, size) in spans.items()}


def strict_json(text: str) -> Any:
    """Parse JSON like `json.loads`, but refuse repeated keys, NaN and Infinity."""
    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{key!r} is declared twice")
            seen.add(key)
    return entries


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _load(text: bytes, path: Path) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise HeaderError(path, f"the header must start with '{{', found {text[:1]!r}; {_TORN}")
    try:
        loaded = strict_json(text.decode("utf-8"))
        if b"\\u" in text:
            json.dumps(loaded, ensure_ascii=False).encode()  # an escape can spell half a surrogate pair
    except UnicodeError as error:
        raise HeaderError(path, f"the header is not UTF-8: {error}; {_TORN}") from None
    except RecursionError:
        raise HeaderError(path, "the header is nested too deeply: not a safetensors file") from None
    except ValueError as error:
        raise HeaderError(path, f"the header is not valid JSON: {error}; {_TORN}") from None
    assert isinstance(loaded, dict), "JSON that starts with '{' is an object"
    return loaded


def _parse_tensor(name: str, entry: object, path: Path, data_start: int) -> TensorInfo:
    if not name or "\0" in name:
        raise HeaderError(path, f"tensor name {name!r} is empty or holds a NUL")
    if not isinstance(entry, dict):
        raise HeaderError(path, f"tensor {name!r}: expected an object, found {_brief(entry)}")
    missing = {"dtype", "shape", "data_offsets"} - entry.keys()
    if missing:
        raise HeaderError(path, f"tensor {name!r}: no {' and no '.join(sorted(missing))}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise HeaderError(path, f"tensor {name!r}: unknown dtype {_brief(dtype)}; known: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)) or len(shape) > MAX_RANK:
        raise HeaderError(
            path,
            f"tensor {name!r}: shape must be a list of at most {MAX_RANK} integers from 0 to 2**63-1, "
            f"found {_brief(shape)}",
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise HeaderError(
            path,
            f"tensor {name!r}: data_offsets must be a list of two integers from 0 to 2**63-1, found {_brief(offsets)}",
        )
    begin, end = offsets
    if end < begin:
        raise HeaderError(path, f"tensor {name!r}: data_offsets [{begin}, {end}] are reversed")
    try:
        nbytes = dtype_nbytes(dtype, shape)
    except (OverflowError, ValueError) as error:
        raise HeaderError(path, f"tensor {name!r}: {error}") from None
    if nbytes != end - begin:
        raise HeaderError(
            path, f"tensor {name!r}: {dtype} {shape} needs {nbytes} bytes, data_offsets span {end - begin}"
        )
    return TensorInfo(name, dtype, tuple(shape), path.name, data_start + begin, nbytes)


def _check_tiling(infos: Sequence[TensorInfo], path: Path, data_start: int, file_bytes: int) -> None:
    """Raise unless the sorted byte ranges cover the data without overlap or hole and end at the end of the file."""
    at = data_start
    for before, info in zip((None, *infos), infos, strict=False):
        if info.offset != at:
            fault = "overlaps" if info.offset < at else "leaves a hole after"
            neighbour = f"tensor {before.name!r}" if before else "the header"
            raise HeaderError(
                path,
                f"tensor {info.name!r} {fault} {neighbour}: it starts at byte {info.offset - data_start} of the data, "
                f"expected {at - data_start}",
            )
        at += info.nbytes
        if at > file_bytes:
            raise HeaderError(
                path, f"tensor {info.name!r} ends at byte {at}, but the file has only {file_bytes}; {_TORN}"
            )
    if at != file_bytes:
        raise HeaderError(path, f"the tensors end at byte {at}, but the file has {file_bytes}: {file_bytes - at} extra")


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_SIZE


def _brief(value: object) -> str:
    """Return `repr(value)` shortened to at most 60 characters, for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_index(root: Path) -> dict[str, str] | None:
    """Return the map from tensor name to shard file, or None if the folder has no index."""
    path = root / INDEX_FILE
    try:
        data = read_small(root, INDEX_FILE, MAX_HEADER_BYTES, ShardIndexError)
    except FileNotFoundError:
        return None
    weight_map = parse_object(data, path, ShardIndexError, strict_json).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ShardIndexError(path, "no weight_map that names a tensor")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ShardIndexError(path, f"tensor {tensor!r}: expected a file name, found {type(shard).__name__}")
    for shard in set(weight_map.values()):
        if not is_safe_name(shard) or not shard.endswith(SHARD_SUFFIX):
            raise UnsafeFileError(path, f"shard name {shard!r} is not the bare name of a *{SHARD_SUFFIX} file")
    return weight_map


def shard_names(root: Path, names: Collection[str], weight_map: Mapping[str, str] | None) -> list[str]:
    present = sorted(name for name in names if name.endswith(SHARD_SUFFIX))
    if weight_map is not None:
        claimed = sorted(set(weight_map.values()))
        missing = [shard for shard in claimed if shard not in names]
        if missing:
            raise ShardIndexError(
                root / INDEX_FILE,
                f"{len(missing)} of {len(claimed)} shards are missing, the first is {missing[0]!r}; download it again",
            )
        if SINGLE_FILE in present and SINGLE_FILE not in claimed:
            raise ShardIndexError(
                root / INDEX_FILE,
                f"two models in one folder: {SINGLE_FILE}, which transformers loads, and the shards of this index; "
                "move one of them away",
            )
        return claimed
    if SINGLE_FILE in present:
        return [SINGLE_FILE]  # every loader takes this file; others are adapters, originals of the same model, ...
    if len(present) > 1:
        raise ShardIndexError(
            root, f"{len(present)} {SHARD_SUFFIX} files but no {INDEX_FILE}: which of them are the model is unknown"
        )
    if present:
        return present
    pickles = sorted(filter(is_pickle, names))
    if pickles:
        raise UnsafeFileError(
            root / pickles[0],
            "a pickle file can run code and is not read; convert the model first, if you trust it: "
            "transformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW) writes safetensors",
        )
    gguf = sorted(filter(is_gguf, names))
    if gguf:
        raise NotACheckpointError(root / gguf[0], GGUF_HINT)
    raise NotACheckpointError(root, f"no {SHARD_SUFFIX} file")


def check_index(weight_map: Mapping[str, str], shards: Mapping[str, Sequence[TensorInfo]], path: Path) -> None:
    for shard, infos in shards.items():
        for info in infos:
            claimed = weight_map.get(info.name)
            if claimed != shard:
                place = f"says it is in {claimed}" if claimed else "does not name it"
                raise ShardIndexError(path, f"{shard} holds tensor {info.name!r}, but the index {place}")
    held = {info.name for infos in shards.values() for info in infos}
    for tensor, shard in weight_map.items():
        if tensor not in held:
            raise ShardIndexError(path, f"tensor {tensor!r} should be in {shard}, which does not hold it")


def encode_index(shards: Mapping[str, Sequence[OutputTensor]]) -> bytes:
    """Encode the index; the bytes depend on the arguments only."""
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)
    weight_map = {tensor.name: shard for shard, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
