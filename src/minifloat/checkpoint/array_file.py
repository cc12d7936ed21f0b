"""The container of arrays that are no checkpoint: a safetensors file with a JSON record, a version and a digest.

safetensors would not notice a flipped bit, which would make a wrong scale, so a SHA-256 covers header and arrays.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint.files import (
    byte_view,
    open_regular,
    parse_object,
    read_exactly,
    storage_errors,
    written_whole,
)
from minifloat.checkpoint.header import encode_header, header_of, strict_json
from minifloat.checkpoint.schema import Check, Unfit
from minifloat.checkpoint.tensors import OutputTensor, TensorInfo
from minifloat.errors import CheckpointError, StatsError

_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _NUMPY.items()}
_PIECE_BYTES = 1 << 24


@dataclass(frozen=True)
class ArrayFormat:
    """What the files of one kind hold."""

    name: str
    version: int
    check: Check
    cure: str
    arrays: Mapping[str, tuple[str, int]] | None = None  #: dtype and dimensions; None: any arrays


@dataclass(frozen=True)
class ArrayContent:
    """Arrays by name and the record of them, about to be written."""

    record: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class ArrayFile:
    """A file whose header, digest and record are checked; arrays are read when they are asked for."""

    path: Path
    record: Mapping[str, Any]
    digest: str
    _infos: Mapping[str, TensorInfo] = field(repr=False)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._infos)

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        info = self._infos[name]
        data = np.empty(info.nbytes, np.uint8)
        with storage_errors(self.path, "open it"):
            descriptor, _ = open_regular(self.path)
        try:
            read_exactly(descriptor, byte_view(data), info.offset, self.path)
        finally:
            os.close(descriptor)
        return data

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return an array of a dtype that numpy has, read-only."""
        info, data = self._infos[name], self.read(name)
        data.flags.writeable = False
        return data.view(_NUMPY[info.dtype]).reshape(info.shape)


def write_arrays(path: Path, kind: ArrayFormat, content: ArrayContent) -> None:
    """Write a file in one step: write a temporary file, sync it, and rename it. Equal content gives equal bytes."""
    arrays = {name: np.ascontiguousarray(array) for name, array in content.arrays.items()}
    outputs = [OutputTensor(name, _DTYPE_NAMES[array.dtype], array.shape) for name, array in arrays.items()]
    record = json.dumps(content.record, allow_nan=False, separators=(",", ":"))
    metadata = {"format": f"minifloat {kind.name}", "version": str(kind.version), "record": record}
    plain, spans = encode_header(outputs, metadata)
    hasher = hashlib.sha256(plain)
    for name in spans:  # in the order of their offsets
        hasher.update(byte_view(arrays[name]))
    header, _ = encode_header(outputs, metadata | {"sha256": hasher.hexdigest()})
    with written_whole(path) as file:
        file.write(header)
        for name in spans:
            file.write(byte_view(arrays[name]))


def read_arrays(path: Path, kind: ArrayFormat) -> ArrayFile:
    """Check a file and return it; `FileNotFoundError` if there is none."""
    descriptor, status = open_regular(path)
    try:
        header = header_of(descriptor, status.st_size, path)
        metadata = dict(header.metadata)
        if metadata.get("format") != f"minifloat {kind.name}":
            raise StatsError(path, f"a safetensors file, but no {kind.name}; give one that minifloat wrote")
        if metadata.get("version") != str(kind.version):
            version = metadata.get("version")
            raise StatsError(path, f"version {version!r}, this minifloat reads version '{kind.version}'; {kind.cure}")
        stated = metadata.pop("sha256", "")
        outputs = [OutputTensor(info.name, info.dtype, info.shape) for info in header.tensors]
        hasher = hashlib.sha256(encode_header(outputs, metadata)[0])
        offset = header.tensors[0].offset if header.tensors else status.st_size
        _hash_from(descriptor, offset, status.st_size, path, hasher)
    except StatsError:
        raise
    except CheckpointError as error:
        raise StatsError(path, f"damaged ({error}); copy it again or {kind.cure}") from error
    finally:
        os.close(descriptor)
    if hasher.hexdigest() != stated or "record" not in metadata:
        raise StatsError(path, f"damaged: its content does not match its SHA-256; copy it again or {kind.cure}")
    infos = {info.name: info for info in header.tensors}
    declared = {name: (info.dtype, len(info.shape)) for name, info in infos.items()}
    if kind.arrays is not None and declared != kind.arrays:
        odd = sorted(name for name in declared.keys() | kind.arrays if declared.get(name) != kind.arrays.get(name))
        raise StatsError(path, f"array {odd[0]!r} is missing, unknown, or of another dtype or rank; {kind.cure}")
    record = parse_object(metadata["record"].encode(), path, StatsError, strict_json, surrogates=True)
    try:
        kind.check(record, "record")
    except Unfit as unfit:
        raise StatsError(path, f"not valid: {unfit}; {kind.cure}") from None
    return ArrayFile(path, record, stated, infos)


def _hash_from(descriptor: int, offset: int, end: int, path: Path, hasher: Any) -> None:
    buffer = bytearray(min(_PIECE_BYTES, end - offset))
    while offset < end:
        view = memoryview(buffer)[: end - offset]
        read_exactly(descriptor, view, offset, path)
        hasher.update(view)
        offset += len(view)
