"""Hessians of a model in a folder beside its activation statistics, so that one pass over the text serves every scheme.

The inputs of the original model do not depend on how its weights are rounded. What GPTQ and folding take from them is
therefore stored once: for each stage of a layer the Hessian of every slot, a held-out sample of inputs that codes are
judged on, and the samples that folds are chosen with. The folder ``NAME.hessians`` holds a safetensors file per layer
and, written last, ``hessians.json`` with the identity of the model and of the text. Not included: what the method match
needs, which are the inputs that the quantized layers give and which differ from scheme to scheme.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minifloat.calibration.identity import ModelIdentity
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.files import (
    byte_view,
    open_regular,
    parse_object,
    read_exactly,
    read_small,
    storage_errors,
    written_whole,
)
from minifloat.checkpoint.header import encode_header, read_header, strict_json
from minifloat.checkpoint.tensors import OutputTensor, TensorInfo
from minifloat.errors import CheckpointError, StatsError
from minifloat.model.runtime.tensors import TORCH_DTYPES
from minifloat.quantize.rounding.stages import Stage

_FORMAT = "minifloat Hessians"
_VERSION = 1
_MANIFEST = "hessians.json"
_MANIFEST_LIMIT = 1 << 28  #: bytes
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def hessians_path(stats: Path) -> Path:
    """Return the folder of the Hessians beside a file of statistics."""
    return stats.with_name(f"{stats.stem}.hessians")


def layer_path(folder: Path, index: int) -> Path:
    """Return the file of a layer in a folder of Hessians."""
    return folder / f"layer-{index}.safetensors"


def pack_symmetric(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix ``[K, K]``, row by row, as ``[K (K + 1) / 2]``."""
    return torch.cat([row[index:] for index, row in enumerate(matrix)])


def unpack_symmetric(packed: Tensor, width: int) -> Tensor:
    """Return the symmetric matrix ``[K, K]`` with this upper triangle."""
    matrix, first = packed.new_empty(width, width), 0
    for index in range(width):
        row = packed[first : first + width - index]
        matrix[index, index:], matrix[index:, index] = row, row
        first += len(row)
    return matrix


@dataclass(frozen=True)
class LayerHessians:
    """What is stored of one layer, about to be written."""

    stages: Sequence[Stage]
    tokens: Sequence[Sequence[int]]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class SavedLayer:
    """What is stored of one layer, in a file."""

    path: Path
    digest: str
    stages: tuple[Stage, ...]
    tokens: tuple[tuple[int, ...], ...]
    _tensors: Mapping[str, TensorInfo] = field(repr=False)

    def hessian(self, stage: int, slot: int) -> Tensor:
        """Return X'X / tokens of a slot, float32 ``[K, K]``, zero if it saw no token."""
        packed, width = self._read(f"hessian.{stage}.{slot}"), self.stages[stage].width
        if packed is None or packed.shape != (width * (width + 1) // 2,):
            raise StatsError(self.path, f"the Hessian {stage}.{slot} is missing or has another size; calibrate again")
        return unpack_symmetric(packed, width)

    def held_out(self, stage: int, slot: int) -> Tensor | None:
        """Return held-out inputs of a slot, float32 ``[T, K]``; None if no token reached it."""
        rows = self._read(f"held_out.{stage}.{slot}")
        return None if rows is None else rows.float()

    def largest(self, stage: int, slot: int) -> Tensor | None:
        """Return the largest input of each channel of a slot, float32 ``[K]``; None if no token reached it."""
        return self._read(f"amax.{stage}.{slot}")

    def fold_sample(self, stage: int, slot: int, held_out: bool) -> Tensor | None:
        """Return inputs to choose or to judge folds on, as `minifloat.quantize.rounding.layer_fold.SampleInputs`."""
        rows = self._read(fold_sample_name(stage, slot if self.stages[stage].outer else 0, held_out))
        return None if rows is None else rows.float()

    def _read(self, name: str) -> Tensor | None:
        if name not in self._tensors:
            return None
        info = self._tensors[name]
        return _read_bytes(self.path, info).view(TORCH_DTYPES[info.dtype]).reshape(info.shape)


def fold_sample_name(stage: int, slot: int, held_out: bool) -> str:
    """Return the name of a sample for folds in the file of a layer."""
    return f"fold.{stage}.{slot}.{'held_out' if held_out else 'calibration'}"


def write_saved_layer(layer: LayerHessians | SavedLayer, path: Path) -> None:
    """Write what is stored of a layer in one step."""
    assert isinstance(layer, LayerHessians)
    stages = [
        {"path": stage.path, "slots": stage.slots, "width": stage.width, "outer": stage.outer, "tokens": list(tokens)}
        for stage, tokens in zip(layer.stages, layer.tokens, strict=True)
    ]
    content = json.dumps({"stages": stages})
    outputs = [
        OutputTensor(name, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in layer.tensors.items()
    ]
    digest = hashlib.sha256(content.encode())
    for name in sorted(layer.tensors):
        digest.update(name.encode() + b"\0")
        digest.update(_bytes_of(layer.tensors[name]))
    metadata = {"format": _FORMAT, "version": str(_VERSION), "content": content, "sha256": digest.hexdigest()}
    header, spans = encode_header(outputs, metadata)
    with written_whole(path) as file:
        file.write(header)
        for name in spans:  # in the order of their offsets
            file.write(_bytes_of(layer.tensors[name]))


def read_saved_layer(path: Path) -> SavedLayer:
    """Return what is stored of a layer, after checking its digest."""
    try:
        header, _ = read_header(path)
    except FileNotFoundError:
        raise StatsError(path, "no such file: the Hessians are incomplete; run `minifloat calibrate` again") from None
    except CheckpointError as error:
        raise StatsError(path, f"damaged ({error}); copy it again or calibrate again") from error
    metadata = header.metadata
    if metadata.get("format") != _FORMAT or "content" not in metadata:
        raise StatsError(path, "a safetensors file, but no Hessians; give a folder that `calibrate --hessians` wrote")
    _require_version(path, metadata.get("version"))
    digest = hashlib.sha256(metadata["content"].encode())
    infos = {info.name: info for info in header.tensors}
    for name in sorted(infos):
        digest.update(name.encode() + b"\0")
        digest.update(_bytes_of(_read_bytes(path, infos[name])))
    if digest.hexdigest() != metadata.get("sha256"):
        raise StatsError(path, "damaged: its content does not match its SHA-256; copy it again or calibrate again")
    content = parse_object(metadata["content"].encode(), path, StatsError, strict_json)
    try:
        stages, tokens = zip(*map(_stage, content["stages"]), strict=True) if content["stages"] else ((), ())
    except (ValueError, TypeError, KeyError) as error:
        raise StatsError(path, f"not valid: {type(error).__name__}: {error}; calibrate again") from None
    return SavedLayer(path, digest.hexdigest(), stages, tokens, infos)


def _stage(row: Mapping[str, Any]) -> tuple[Stage, tuple[int, ...]]:
    """Return a stage and the tokens of its slots; an exception means that the row is not valid."""
    stage_path, slots, width, tokens = row["path"], row["slots"], row["width"], row["tokens"]
    texts = [stage_path, *(name for slot in slots for name in slot)]
    counts = [width, *tokens]
    if not all(isinstance(text, str) for text in texts) or not isinstance(row["outer"], bool | None):
        raise ValueError("expected names, and whether a stage is an outer one")
    if not all(type(count) is int and count >= 0 for count in counts) or len(tokens) != len(slots):
        raise ValueError("expected a width, and a number of tokens for each slot")
    return Stage(stage_path, tuple(map(tuple, slots)), width, outer=row["outer"]), tuple(tokens)


@dataclass(frozen=True)
class SavedHessians:
    """The Hessians of all layers of a model."""

    folder: Path
    model: ModelIdentity
    run: str
    data: Mapping[str, Any]
    tokens: int
    layers: tuple[str, ...]

    def save(self) -> None:
        """Write ``hessians.json``, which makes the folder complete."""
        content = {key: value for key, value in asdict(self).items() if key != "folder"}
        text = json.dumps(content, sort_keys=True)
        manifest = {"format": _FORMAT, "version": _VERSION, "content": content, "sha256": _sha256(text)}
        with written_whole(self.folder / _MANIFEST) as file:
            file.write(json.dumps(manifest, indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> SavedHessians:
        """Return the Hessians in a folder."""
        path = folder / _MANIFEST
        if not path.is_file():
            raise StatsError(
                folder, "no Hessians: `minifloat calibrate MODEL STATS --data DATA --hessians` writes them beside STATS"
            )
        raw = read_small(folder.resolve(), _MANIFEST, _MANIFEST_LIMIT, StatsError)
        try:
            manifest = parse_object(raw, path, StatsError)
            version, content = manifest["version"], manifest["content"]
            is_whole = manifest["format"] == _FORMAT and manifest["sha256"] == _sha256(
                json.dumps(content, sort_keys=True)
            )
        except (KeyError, TypeError, RecursionError, StatsError):
            raise StatsError(path, "damaged: not what `calibrate --hessians` writes; calibrate again") from None
        _require_version(path, str(version))
        if not is_whole:
            raise StatsError(path, "damaged: its content does not match its SHA-256; calibrate again")
        identity = ModelIdentity(**{each.name: str(content["model"][each.name]) for each in fields(ModelIdentity)})
        layers = tuple(content["layers"])
        return cls(folder, identity, content["run"], content["data"], int(content["tokens"]), layers)

    @staticmethod
    def exist(folder: Path) -> bool:
        """Return whether a folder holds complete Hessians."""
        return (folder / _MANIFEST).exists()

    @staticmethod
    def discard(folder: Path) -> None:
        """Make a folder incomplete, so that its layers can be written again."""
        with storage_errors(folder / _MANIFEST, "delete"):
            (folder / _MANIFEST).unlink(missing_ok=True)

    def layer(self, index: int) -> SavedLayer:
        """Return what is stored of a layer."""
        layer = read_saved_layer(layer_path(self.folder, index))
        if layer.digest != self.layers[index]:
            raise StatsError(layer.path, f"not the layer that {_MANIFEST} names; calibrate again")
        return layer

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise an error unless these are the Hessians of the model in a checkpoint."""
        differences = self.model.differences(ModelIdentity.of(checkpoint))
        if differences:
            raise StatsError(
                checkpoint.path,
                f"the Hessians in {self.folder} are of another model, it differs in {', '.join(differences)}; "
                "calibrate this model, from this folder",
            )


def _require_version(path: Path, version: str | None) -> None:
    if version != str(_VERSION):
        raise StatsError(path, f"version {version}, this minifloat reads version {_VERSION}; calibrate again")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return byte_view(np.ascontiguousarray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))


def _read_bytes(path: Path, info: TensorInfo) -> Tensor:
    data = torch.empty(info.nbytes, dtype=torch.uint8)
    with storage_errors(path, "open it"):
        descriptor, _ = open_regular(path)
    try:
        read_exactly(descriptor, byte_view(data.numpy()), info.offset, path)
    finally:
        os.close(descriptor)
    return data
