"""Activation statistics as one safetensors file.

The arrays of all modules are stacked into seven tensors. Equal rows are stored once (linears that share an input, the
token counts of every dense linear), and histograms store only the bins that some module used: 512 sequences through a
model of 70 billion parameters take about 4 MB. Everything else is JSON in the metadata of the header, with a SHA-256
over the JSON and the tensors, because safetensors itself would not notice a flipped bit, which would make a wrong
scale.

The content of a file is not trusted: `checkpoint.header` validates the header, and the classes of `stats` the arrays.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.calibration.identity import ModelIdentity
from minifloat.calibration.stats import SCHEMA_VERSION, ActivationStats, KVStats, ModuleStats
from minifloat.checkpoint.files import (
    byte_view,
    open_regular,
    parse_object,
    read_exactly,
    storage_errors,
    written_whole,
)
from minifloat.checkpoint.header import encode_header, read_header, strict_json
from minifloat.checkpoint.tensors import OutputTensor, TensorInfo
from minifloat.errors import StatsError
from minifloat.numerics.histogram import BINS

_FORMAT = "minifloat activation statistics"

#: Dtype and number of dimensions of each tensor in a file. Rows of amax and tokens are `[S]`, rows of histogram `[used
#: bins]`; channel_amax holds its rows end to end; k_amax and v_amax are `[S, heads of all attentions]`.
_TENSORS: dict[str, tuple[str, int]] = {
    "amax": ("F32", 2),
    "tokens": ("I64", 2),
    "histogram": ("I64", 2),
    "bins": ("I64", 1),
    "channel_amax": ("F32", 1),
    "k_amax": ("F32", 2),
    "v_amax": ("F32", 2),
}
_NUMPY: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8")}

_Arrays = dict[str, npt.NDArray[Any]]


class _Rows:
    """A list of distinct arrays."""

    def __init__(self) -> None:
        self.rows: list[npt.NDArray[Any]] = []
        self._index: dict[bytes, int] = {}

    def add(self, row: npt.NDArray[Any] | None) -> int | None:
        """Add a row unless an equal one exists, and return its index; return None for None."""
        if row is None:
            return None
        index = self._index.setdefault(row.tobytes(), len(self.rows))
        if index == len(self.rows):
            self.rows.append(row)
        return index


def write_stats(stats: ActivationStats, path: str | os.PathLike[str]) -> None:
    """Write the statistics to a file in one step: write a temporary file beside it, sync the file, and rename it."""
    target = Path(path)
    content, arrays = _encode(stats)
    outputs = [OutputTensor(name, _TENSORS[name][0], array.shape) for name, array in arrays.items()]
    metadata = {"format": _FORMAT, "schema_version": str(SCHEMA_VERSION), "content": content}
    header, spans = encode_header(outputs, metadata | {"sha256": _digest(content, arrays)})
    with written_whole(target) as file:
        file.write(header)
        for name in spans:  # in the order of their offsets
            file.write(byte_view(arrays[name]))


def read_stats(path: str | os.PathLike[str]) -> ActivationStats:
    """Return the statistics in a file."""
    source = Path(path)
    try:
        header, _ = read_header(source)
    except FileNotFoundError:
        raise StatsError(source, "no such file; `minifloat calibrate` writes one") from None
    metadata = header.metadata
    if metadata.get("format") != _FORMAT or "content" not in metadata:
        raise StatsError(source, "a safetensors file, but no activation statistics; give one that `calibrate` wrote")
    version = metadata.get("schema_version")
    if version != str(SCHEMA_VERSION):
        raise StatsError(
            source, f"version {version!r}, this minifloat reads version '{SCHEMA_VERSION}'; calibrate again"
        )
    arrays = _read_arrays(source, header.tensors)
    if metadata.get("sha256") != _digest(metadata["content"], arrays):
        raise StatsError(source, "damaged: its content does not match its SHA-256; copy it again or calibrate again")
    content = parse_object(metadata["content"].encode(), source, StatsError, strict_json, surrogates=True)
    try:
        return _decode(content, arrays)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise StatsError(source, f"not valid: {type(error).__name__}: {error}; calibrate again") from None


def _encode(stats: ActivationStats) -> tuple[str, _Arrays]:
    """Return the JSON and the tensors of a file; equal statistics give equal bytes."""
    amax, tokens, histograms, channels = _Rows(), _Rows(), _Rows(), _Rows()
    inputs = {
        name: [
            amax.add(module.amax),
            tokens.add(module.tokens),
            histograms.add(module.histogram),
            channels.add(module.channel_amax),
        ]
        for name, module in sorted(stats.inputs.items())
    }
    kv = sorted(stats.kv.items())
    no_heads = np.empty((stats.sequences, 0), np.float32)
    counts = _stack(histograms.rows, BINS, np.int64)
    bins = np.flatnonzero(counts.any(axis=0))
    arrays = {
        "amax": _stack(amax.rows, stats.sequences, np.float32),
        "tokens": _stack(tokens.rows, stats.sequences, np.int64),
        "histogram": counts[:, bins],
        "bins": bins,
        "channel_amax": np.concatenate([*channels.rows, np.empty(0, np.float32)]),
        "k_amax": np.concatenate([*(entry.k_amax for _, entry in kv), no_heads], axis=1),
        "v_amax": np.concatenate([*(entry.v_amax for _, entry in kv), no_heads], axis=1),
    }
    content = {
        "model": asdict(stats.model),
        "sequences": stats.sequences,
        "tokens": stats.tokens,
        "data": dict(stats.data),
        "inputs": inputs,
        "channels": [len(row) for row in channels.rows],
        "kv": {name: entry.heads for name, entry in kv},
    }
    text = json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return text, {name: np.ascontiguousarray(array, _NUMPY[_TENSORS[name][0]]) for name, array in arrays.items()}


def _stack(rows: list[npt.NDArray[Any]], columns: int, dtype: type) -> npt.NDArray[Any]:
    return np.stack(rows) if rows else np.empty((0, columns), dtype)


def _decode(content: Mapping[str, Any], arrays: _Arrays) -> ActivationStats:
    """Return the statistics that `_encode` encoded; any exception means that the file is not valid."""
    identity = content["model"]
    names = [field.name for field in fields(ModelIdentity)]
    if sorted(identity) != sorted(names) or not all(isinstance(identity[name], str) for name in names):
        raise ValueError("the identity of the model")
    histograms = np.zeros((len(arrays["histogram"]), BINS), np.int64)
    histograms[:, _ascending(arrays["bins"])] = arrays["histogram"]
    channels = _cut(arrays["channel_amax"], content["channels"])
    inputs = {
        name: ModuleStats(
            arrays["amax"][_index(rows[0])],
            arrays["tokens"][_index(rows[1])],
            None if rows[2] is None else histograms[_index(rows[2])],
            None if rows[3] is None else channels[_index(rows[3])],
        )
        for name, rows in content["inputs"].items()
    }
    heads = content["kv"]
    k_amax = _cut(arrays["k_amax"], list(heads.values()))
    v_amax = _cut(arrays["v_amax"], list(heads.values()))
    kv = {name: KVStats(k, v) for name, k, v in zip(heads, k_amax, v_amax, strict=True)}
    sequences, tokens = _index(content["sequences"]), _index(content["tokens"])
    return ActivationStats(ModelIdentity(**identity), sequences, tokens, dict(content["data"]), inputs, kv)


def _cut(array: npt.NDArray[Any], lengths: list[int]) -> list[npt.NDArray[Any]]:
    """Return consecutive pieces of the last axis with these lengths, which must add up to its size."""
    ends = np.cumsum([0, *map(_index, lengths)])
    if ends[-1] != array.shape[-1]:
        raise ValueError(f"pieces of {ends[-1]} columns, expected {array.shape[-1]}")
    return [array[..., begin:end] for begin, end in itertools.pairwise(ends)]


def _index(value: Any) -> int:
    """Return a JSON value that must be an integer of at least 0 (Python would take -1 for the last row)."""
    if type(value) is not int or value < 0:
        raise ValueError(f"expected an integer from 0 on, found {value!r}")
    return value


def _ascending(bins: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if bins.size and (bins[0] < 0 or (np.diff(bins) <= 0).any()):
        raise ValueError("the bins of the histograms are not ascending")
    return bins


def _read_arrays(path: Path, infos: Iterable[TensorInfo]) -> _Arrays:
    """Return the tensors of a file, read-only, by name."""
    infos_by_name = {info.name: info for info in infos}
    declared = {name: (info.dtype, len(info.shape)) for name, info in infos_by_name.items()}
    if declared != _TENSORS:
        odd = sorted(name for name in declared.keys() | _TENSORS if declared.get(name) != _TENSORS.get(name))
        raise StatsError(path, f"tensor {odd[0]!r} is missing, unknown, or of another dtype or rank; calibrate again")
    arrays: _Arrays = {}
    with storage_errors(path, "open it"):
        descriptor, _ = open_regular(path)
    try:
        for name, info in infos_by_name.items():
            data = bytearray(info.nbytes)
            read_exactly(descriptor, memoryview(data), info.offset, path)
            arrays[name] = np.frombuffer(bytes(data), _NUMPY[info.dtype]).reshape(info.shape)
    finally:
        os.close(descriptor)
    return arrays


def _digest(content: str, arrays: _Arrays) -> str:
    """Return the SHA-256 of the JSON, and of name, shape and bytes of every tensor in the order of `_TENSORS`."""
    digest = hashlib.sha256(content.encode())
    for name in _TENSORS:
        array = arrays[name]
        digest.update(f"\0{name} {list(array.shape)}\0".encode())
        digest.update(byte_view(array))
    return digest.hexdigest()
